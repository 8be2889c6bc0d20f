"""The kernels' layouts: every code where the definition says, padding of zero weights, exact ways
back."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megabit_kernels import layouts, packing

# 3456 = 6912 / TP 2 is no multiple of 256; the others surround the sizes of the tiles.
SIZES = [
    (0, 0),
    (0, 300),
    (3, 0),
    (1, 1),
    (15, 17),
    (64, 256),
    (65, 257),
    (63, 255),
    (130, 33),
    (5, 3456),
    (3456, 20),
]


def random_codes(n: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(n + 10_000 * k)
    return torch.randint(-1, 2, (n, k), generator=generator, dtype=torch.int8)


def padded(codes: Tensor, n: int, k: int) -> Tensor:
    """The codes in the corner of a zero matrix."""
    result = torch.zeros(n, k, dtype=torch.int32)
    result[: codes.shape[0], : codes.shape[1]] = codes
    return result


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_planes_are_as_documented(n: int, k: int) -> None:
    codes = random_codes(n, k)
    planes = layouts.to_planes(codes)
    blocks = (k + 255) // 256
    assert planes.dtype == torch.uint8
    assert planes.shape == layouts.planes_shape(n, k) == (n, 64 * blocks)
    column = torch.arange(256 * blocks)
    block, plane, j = column // 256, column % 256 // 64, column % 64
    fields = planes.int()[:, 64 * block + j] >> 2 * plane & 3
    assert torch.equal(fields - 1, padded(codes, n, 256 * blocks))


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_panels_are_as_documented(n: int, k: int) -> None:
    codes = random_codes(n, k)
    data = layouts.to_panels(codes)
    panels, blocks = (n + 63) // 64, (k + 15) // 16
    assert data.dtype == torch.uint8
    assert data.is_contiguous()
    assert data.shape == layouts.panels_shape(n, k) == (panels, blocks, 4, 64)
    row, column = torch.arange(64 * panels).unsqueeze(1), torch.arange(16 * blocks)
    plane, i = column % 16 // 4, column % 4
    r = row % 16
    fields = data.int()[row // 64, column // 16, row % 64 // 16, 4 * r + i] >> 2 * plane & 3
    assert torch.equal(fields - 1, padded(codes, 64 * panels, 16 * blocks))


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_both_lead_back_to_the_codes(n: int, k: int) -> None:
    codes = random_codes(n, k)
    for back in (
        layouts.from_planes(layouts.to_planes(codes), k),
        layouts.from_panels(layouts.to_panels(codes), n, k),
    ):
        assert back.dtype == torch.int8
        assert back.is_contiguous()
        assert torch.equal(back, codes)


def test_views_that_are_not_contiguous() -> None:
    codes = random_codes(70, 300)
    for view in [codes.t(), codes[:, ::2], codes[::3], codes[1:, 1:], codes[:, :1].expand(-1, 40)]:
        n, k = view.shape
        planes, panels = layouts.to_planes(view), layouts.to_panels(view)
        assert torch.equal(planes, layouts.to_planes(view.contiguous()))
        assert torch.equal(panels, layouts.to_panels(view.contiguous()))
        assert torch.equal(layouts.from_planes(planes.t().contiguous().t(), k), view)
        reversed_storage = panels.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        assert torch.equal(layouts.from_panels(reversed_storage, n, k), view)


def test_a_shard_is_laid_out_from_the_packed_form() -> None:
    """Neither layout can be cut at column 3456 of 6912; the packed form can."""
    codes = random_codes(8, 6912)
    shard = packing.slice_packed(packing.pack(codes), 6912, columns=slice(3456, 6912))
    half = packing.unpack(shard, 3456)
    assert torch.equal(layouts.from_planes(layouts.to_planes(half), 3456), codes[:, 3456:])
    assert torch.equal(layouts.from_panels(layouts.to_panels(half), 8, 3456), codes[:, 3456:])


@pytest.mark.parametrize("to_layout", [layouts.to_planes, layouts.to_panels])
def test_codes_of_the_wrong_kind_are_refused(to_layout: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TypeError, match=r"codes must be torch.int8, not torch.uint8"):
        to_layout(torch.zeros(2, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"codes must have 2 dimensions, not shape \(4,\)"):
        to_layout(torch.zeros(4, dtype=torch.int8))


def test_sizes_that_do_not_fit_are_refused() -> None:
    planes, panels = layouts.to_planes(random_codes(3, 300)), layouts.to_panels(random_codes(3, 30))
    with pytest.raises(ValueError, match=r"planes has shape \(3, 128\); K = 256 needs \(3, 64\)"):
        layouts.from_planes(planes, 256)
    with pytest.raises(TypeError, match=r"planes must be torch.uint8, not torch.int8"):
        layouts.from_planes(planes.view(torch.int8), 300)
    for n, k in [(65, 30), (3, 33), (-3, 30)]:
        message = rf"panels has shape \(1, 2, 4, 64\); \[N, K\] = \[{n}, {k}\] needs"
        with pytest.raises(ValueError, match=message):
            layouts.from_panels(panels, n, k)
    with pytest.raises(ValueError, match="panels has shape"):
        layouts.from_panels(panels.flatten(2), 3, 30)
    with pytest.raises(TypeError, match=r"panels must be torch.uint8, not torch.int8"):
        layouts.from_panels(panels.view(torch.int8), 3, 30)
