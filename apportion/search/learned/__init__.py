"""learned: placement by learned policies.

In: a graph of operator groups. Out: a device for each.
Read placeto_simulator.py, the simulator with Placeto's constants that its policies are judged by.
"""
