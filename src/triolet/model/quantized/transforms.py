"""Rotations that compressed-tensors describes beside the weights, in `transform_config`.

Those at a weight's own input or output are in the stored weights already. Those of activations are computed while the
model runs, and without them the stored weights mean something else.

Source: compressed-tensors, `TransformLocation`.
"""

from __future__ import annotations

from typing import Final

from triolet.model.folder.json_fields import Fields

_IN_WEIGHTS: Final = ("weight_input", "weight_output")


def refuse_transforms(fields: Fields) -> None:
    """Check that `quantization_config` asks for no rotation of activations.

    Raises:
        ModelFileError: it does, or says it in another form.
    """
    transforms = fields.section("transform_config")
    groups = None if transforms is None else transforms.section("config_groups")
    for name in () if groups is None else groups.values:
        group = None if groups is None else groups.section(name)
        places = None if group is None else group.values.get("apply")
        if not isinstance(places, list) or not all(map(_is_in_weights, places)):
            raise fields.wrong(
                "transform_config", "without rotations of activations: those of weights alone are supported"
            )


def _is_in_weights(place: object) -> bool:
    return isinstance(place, dict) and place.get("location") in _IN_WEIGHTS
