"""An architecture that nobody here knows, whose experts follow a known scheme."""

from typing import Any

from kconvert.layouts.errors import UnsupportedError
from kconvert.layouts.families.family import SCHEMES, Family, Stated
from kconvert.layouts.fields import CONFIG_NAME, natural, positive
from kconvert.layouts.sharding import MOST, ModelDims

_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")
_WIDTHS = ("moe_intermediate_size", "intermediate_size")


class Other(Family):
    """Its experts are converted by their names, with a warning; the rest is kept whole."""

    complete = False

    def _read(self, config: dict[str, Any]) -> ModelDims:
        self.architecture = str(config.get("architectures") or config.get("model_type"))
        experts, width = (
            next((key for key in keys if config.get(key) is not None), None)
            for keys in (_EXPERTS, _WIDTHS)
        )
        if experts is None or width is None:
            raise UnsupportedError(
                f"{CONFIG_NAME}: the architecture {self.architecture:.60} is not known, and none of"
                f" {', '.join(_EXPERTS if experts is None else _WIDTHS)} says how"
                f" {'many experts it has' if experts is None else 'large its experts are'}."
            )
        return ModelDims(
            layers=positive(config, "num_hidden_layers", MOST),
            mtp_layers=natural(config, "num_nextn_predict_layers", 0, MOST),
            first_moe=0,
            experts=positive(config, experts, MOST),
            hidden=positive(config, "hidden_size"),
            intermediate=positive(config, width),
            quantization=self.format.quantization,
            dense=None,
        )

    @property
    def warnings(self) -> list[str]:
        return [
            f"{CONFIG_NAME}: the architecture {self.architecture:.60} is not known: its experts are"
            f" converted by their names ({SCHEMES}), everything else is kept as it is, unchecked"
        ]

    def stated(self, layer: int | None, block: str) -> dict[str, Stated]:
        return {}
