"""lists: placers that give every unit its device once, in one pass.

In: an objective. Out: a placement.
Read one_device.py and blocks.py, then list_schedule.py, m_etf.py and m_sct.py.
"""
