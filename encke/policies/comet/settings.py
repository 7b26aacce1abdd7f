"""Settings in force at each site: Comet's knowledge of one training, as data that can be saved."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from encke.capture.sites import Site
from encke.codecs import Codec
from encke.codecs.algebra import strictest
from encke.policies.comet.theory import Gain


@dataclass(slots=True)
class Setting:
    """The codec in force at one place, and how far predictions there were off."""

    codec: Codec
    gain: Gain = field(default_factory=Gain)
    values: int = 0
    """Values saved here last, if a weight's gradient is computed from them."""
    lasting: Codec | None = None
    """The codec where it cannot change soon, if it is another."""

    def to_dict(self) -> dict[str, Any]:
        """Return the setting as plain data."""
        lasting = {} if self.lasting is None else {"lasting": self.lasting.to_dict()}
        return {**self.codec.to_dict(), "gain": asdict(self.gain), "values": self.values, **lasting}

    @staticmethod
    def from_dict(data: dict[str, Any], seed: int) -> Setting:
        """Return the setting that `to_dict` wrote; its codec gets the seed of the policy that reads it."""
        settings = {name: value for name, value in data.items() if name not in ("gain", "values", "lasting")}
        # States saved before version 0.2 do not name the codec.
        settings.setdefault("codec", "GroupQuant" if "bits" in settings else "ErrorBounded")
        codec = Codec.from_dict({**settings, "seed": seed})
        lasting = Codec.from_dict({**data["lasting"], "seed": seed}) if "lasting" in data else None
        return Setting(codec, Gain(**data["gain"]), data["values"], lasting)


class Learnt:
    """Everything that Comet has learnt from one training and that its choices depend on."""

    def __init__(self) -> None:
        self.settings: dict[str, Setting] = {}
        """Settings in force, by place."""
        self.layers: dict[str, Codec] = {}
        """The strictest codec of each layer, for new places."""
        self.history: list[dict[str, Any]] = []
        self.turn = 0
        """Start of the next round of measured places."""
        self.warned = False

    def find_strictest(self) -> None:
        """Update `layers` from `settings`."""
        layers: dict[str, list[Codec]] = {}
        for place, setting in self.settings.items():
            layers.setdefault(place.rsplit("/", 2)[0], []).append(setting.codec)
        self.layers = {layer: strictest(codecs) for layer, codecs in layers.items()}

    def note(self, step: int, site: Site, setting: Setting, share: float, std: float, **figures: float) -> None:
        """Add an entry to the history; a figure that is NaN becomes None."""
        codec = setting.codec.to_dict()
        row = {"step": step, "layer": site.layer, "operation": site.operation, "slot": site.slot, "place": site.place}
        row |= {"codec": codec["codec"], "bound": codec.get("bound"), "bits": codec.get("bits")}
        row |= {"share": share, "std": std, "gain": setting.gain.value}
        self.history.append(row | {name: None if math.isnan(value) else value for name, value in figures.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data that later learning does not change."""
        settings = {place: setting.to_dict() for place, setting in self.settings.items()}
        state = {"settings": settings, "history": self.history, "turn": self.turn, "warned": self.warned}
        return copy.deepcopy(state)

    @staticmethod
    def from_dict(state: dict[str, Any], seed: int) -> Learnt:
        """Return the facts that `to_dict` wrote."""
        learnt = Learnt()
        learnt.settings = {place: Setting.from_dict(data, seed) for place, data in state["settings"].items()}
        learnt.history = list(state["history"])
        learnt.turn, learnt.warned = state["turn"], state["warned"]
        learnt.find_strictest()
        return learnt
