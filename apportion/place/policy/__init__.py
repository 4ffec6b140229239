"""policy: the placer that has learned, used without torch.

In: a PlacementProblem and a policy file. Out: a placement.
Read policy_features.py, policy_network.py, policy_decode.py and policy.py.
"""
