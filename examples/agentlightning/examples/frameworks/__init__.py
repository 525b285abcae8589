"""One small program per framework, as its own documentation would write it. None knows of agentlightning.

agl run -- python -m agentlightning.examples.frameworks.langgraph_team "How many pens are in 7 boxes of 6?"
"""
