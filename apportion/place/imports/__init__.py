"""imports: what makes a PlacementProblem.

In: a file of a published format, or a captured step with a Cluster and its costs. Out: a
PlacementProblem; the other way round, a file of any of them.
Read captured.py, then imported_graph.py and the formats: fiddle.py, pipedream_profile.py and
doppler_graph.py.
"""
