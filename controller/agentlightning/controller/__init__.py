"""The controller: runs agents, one process per rollout, and reports how each ended.

It claims rollouts from the gateway under a lease, starts the agent of each with an environment that says where
model and collector are, judges the output with an evaluator that the agent cannot reach, and leaves no process
behind. Needs `pip install 'agentlightning[controller]'`.
"""
