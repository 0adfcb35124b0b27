"""Times of collectives against sums by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from maxtext.parallel.chips import CHIPS, chip_of
from maxtext.parallel.network import Network, network_of, spread

pytestmark = pytest.mark.one_pass  # arithmetic alone
V5P = Network(CHIPS["v5p"], 64, (4, 4, 4))
H100 = Network(CHIPS["h100"], 8)
MIB = 1 << 20


def test_an_all_gather_inside_a_slice_uses_all_links():
    """64 chips span 3 dims: 6 links of 100 GB/s each, rings of 4 both ways: 2 hops a dim."""
    assert V5P.seconds("all-gather", 64e9, 64) == pytest.approx(63e9 / 600e9 + 6e-6 + 2e-6)
    assert V5P.seconds("all-gather", 64e9, 4) == pytest.approx(48e9 / 200e9 + 2e-6 + 2e-6)
    assert V5P.seconds("reduce-scatter", 64e9, 64, calls=3) == pytest.approx(3 * V5P.seconds("all-gather", 64e9, 64))


def test_devices_of_one_chip_share_its_links():
    ironwood = Network(CHIPS["tpu7x"], 128, (4, 4, 4))
    assert ironwood.near_rate(128) == 300e9


def test_between_slices_each_member_exchanges_its_share():
    """An all-reduce of 64 GB over 2 slices of 64: 1 GB a device, half of it each way twice, at 6.25 GB/s."""
    between = 2 * (1e9 / 2 / 6.25e9 + 50e-6)
    inside = 2 * (63e9 / 600e9 + 6e-6)
    assert V5P.seconds("all-reduce", 64e9, 64, 2) == pytest.approx(between + inside + 2e-6)


def test_nodes_of_gpus_go_through_one_port_a_gpu():
    near = 8 * MIB * 7 / 8 / 370e9 + 7 * 3.4e-6
    far = 8 * MIB / 8 * 3 / 4 / (370 / 450 * 50e9) + 3 * 9.6e-6
    assert H100.seconds("all-gather", 8 * MIB, 8, 4) == pytest.approx(near + far + 8.4e-6)


def test_a_small_all_reduce_takes_the_tree_and_a_large_one_the_ring():
    small = H100.seconds("all-reduce", 1024, 8, 512)
    moved = 2 * 1024 / 370e9 + 2 * 1024 / (370 / 450 * 400e9)
    assert small == pytest.approx(8.4e-6 + 2 * (3 * 3.4e-6 + 9 * 9.6e-6) + moved / 0.9, rel=1e-9)
    ring = 2 * (8e9 / 8 * 511 / 512 / (370 / 450 * 50e9) + 511 * 9.6e-6 + 7e9 / 370e9 + 7 * 3.4e-6)
    assert H100.seconds("all-reduce", 8e9, 8, 512) == pytest.approx(ring + 8.4e-6)


def test_one_device_exchanges_nothing():
    assert H100.seconds("all-reduce", 1e9, 1) == H100.seconds("all-gather", 1e9, 8, calls=0) == 0


def test_where_the_members_of_a_group_lie():
    """The last axis varies fastest: 2 x 8 x 4 devices in domains of 8 hold two fsdp positions and all of tensor."""
    sizes = {"data": 2, "fsdp": 8, "tensor": 4}
    assert spread(("tensor",), sizes, 8) == (4, 1)
    assert spread(("fsdp",), sizes, 8) == (2, 4)
    assert spread(("data",), sizes, 8) == (1, 2)
    assert spread(("data", "fsdp"), sizes, 8) == (2, 8)
    assert spread(sizes, sizes, 64) == (64, 1)


def test_the_network_of_devices_at_hand():
    tpus = [SimpleNamespace(device_kind="TPU v5", slice_index=number // 8, process_index=0,
                            coords=(number % 2, number // 2 % 2, number // 4 % 2)) for number in range(16)]
    assert network_of(tpus) == Network(CHIPS["v5p"], 8, (2, 2, 2))
    gpus = [SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", process_index=number // 8) for number in range(32)]
    assert network_of(gpus) == H100
    alone = [SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", process_index=number) for number in range(32)]
    assert network_of(alone) == H100
    assert network_of([SimpleNamespace(device_kind="cpu", process_index=0)] * 4) == Network(None, 4)


@pytest.mark.parametrize(("kind", "name"), [("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"),
                                            ("TPU7x", "tpu7x"), ("NVIDIA GB200", "gb200"), ("NVIDIA B200", "b200")])
def test_chips_are_known_by_what_their_devices_say(kind: str, name: str):
    chip = chip_of(kind)
    assert chip is not None
    assert chip.name == name


def test_a_cpu_is_no_chip():
    assert chip_of("cpu") is None
