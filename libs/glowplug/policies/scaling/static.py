"""Static scaling: `min_instances` of each model, all the time. The baseline of PreServe section 5.3 ("static 8"), and
of GPU sharing (MuxServe in WarmServe section 7.1: "instances are created in prior"), where nothing starts or stops with
the load.

Departure: in `scale` a model with no minimum gets one instance while requests wait or run, else it could never answer.
"""

from glowplug.domain.model import Model
from glowplug.domain.phrasing import counted
from glowplug.domain.snapshot import FleetSnapshot
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling.standing import settle, standing


def scale(snapshot: FleetSnapshot, model: Model, state: None = None) -> tuple[ScaleDecision, None]:
    """The model's minimum."""
    st = standing(snapshot, model)
    least = st.floor or (1 if st.demand else 0)
    return settle(st, least, f"its least number, {counted(st.floor, 'instance')}, is kept at all times"), None


def muxserve_like(snapshot: FleetSnapshot, model: Model, state: None = None) -> tuple[ScaleDecision, None]:
    """The model's minimum, and one of every model from the moment that it is deployed."""
    st = standing(snapshot, model)
    least = max(1, st.floor)
    why = f"its least number, {counted(least, 'instance')}, is kept from its deployment on"
    return settle(st, least, why, keep_alive_s=-1), None
