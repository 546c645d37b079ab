"""One linear layer by itself, as encoders use it: equal to torch's in float64 for any rows, and each row for itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.kernels.cpu_variants import compiled, on_every_cpu_variant
from triolet.model.backends.cpu.linear import CppLinearLayer, use_cpp_linear_layers


@on_every_cpu_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_equals_the_exact_product_and_no_row_depends_on_others(
    variant: str, dtype: torch.dtype
) -> None:
    plain = nn.Linear(70, 130, bias=True).to(dtype)
    layer = CppLinearLayer(plain, compiled(variant))
    x = torch.randn(1, 1700, 70).to(dtype)  # several parts of rows, the last one short
    got = layer(x)
    assert plain.bias is not None
    exact = x.double() @ plain.weight.double().T + plain.bias.double()
    assert got.shape == (1, 1700, 130)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)
    if dtype == torch.float32:  # AMX sums pairs of bfloat16 in another order, and takes only many rows
        assert torch.equal(layer(x[:, 7:9]), got[:, 7:9])


def test_only_large_plain_layers_are_replaced() -> None:
    class Special(nn.Linear):
        pass

    compiled()
    model = nn.Sequential(nn.Linear(8, 64), Special(8, 64), nn.Linear(8, 2), nn.Linear(7, 64))
    kept = list(model)[1:]
    use_cpp_linear_layers(model)
    assert isinstance(model[0], CppLinearLayer)
    assert list(model)[1:] == kept
    with pytest.raises(TypeError, match=r"x must be torch\.float32; got torch\.bfloat16"):
        model[0](torch.ones(1, 8, dtype=torch.bfloat16))
