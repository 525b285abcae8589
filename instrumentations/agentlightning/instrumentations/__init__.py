"""What makes frameworks traceable: called by `agentlightning.sdk.instrument`, and by entry points of OpenTelemetry.

`choose` says what is wanted, `activate` starts it as far as it is installed, `deactivate` takes everything back. A framework that has not been
imported is not imported for this: its part waits until the program does it.
"""

from agentlightning.instrumentations._activate import activate, deactivate
from agentlightning.instrumentations._choice import Plan, choose

__all__ = ["Plan", "activate", "choose", "deactivate"]
