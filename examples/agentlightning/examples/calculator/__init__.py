"""The quickstart's example: an AutoGen agent with a calculator, its tasks and its reward.

`agent` is the program, which knows nothing of agentlightning; `tasks` and `reward` are what its training needs.
"""
