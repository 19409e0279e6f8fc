"""Counts of the protocol, and statistics; what runs on a GPU is not tested here."""

import sys
from types import SimpleNamespace

import pytest
import torch

from billfish.bench import nvml, timing
from billfish.bench.timing import QUICK, Rules, Timing
from billfish.errors import UserError

RULES = Rules()


@pytest.mark.parametrize(
    ("nbytes", "copies"),
    [
        (8_650_752, 47),  # 4096 x 4096, 4 bit, g128: 46 x 8.65 MB = 398 MB are too few
        (60_555_264, 7),
        (242_221_056, 4),  # two would do; four is the least
        (100_000_000, 5),  # more than 400 MB, not as much
        (166_000, 2410),
    ],
)
def test_copies_hold_more_than_the_l2_can(nbytes, copies):
    assert RULES.copies(nbytes, 4) == copies
    assert copies * nbytes > 400_000_000


def test_tiny_layers_do_not_fill_the_day():
    assert RULES.copies(4600, 4) == 4096


def test_dense_weights_may_be_two():
    assert RULES.copies(939_524_096, 2) == 2
    assert RULES.copies(33_554_432, 2) == 12


@pytest.mark.parametrize("rules", [RULES, QUICK])
@pytest.mark.parametrize("copies", [1, 2, 4, 7, 13, 47, 99, 150, 200])
@pytest.mark.parametrize("floor", [0.5, 1.8, 12.6, 50.5, 3887.0])
def test_launches_go_round_the_copies_within_the_limits(rules, copies, floor):
    launches = rules.launches(copies, floor)
    assert launches % copies == 0
    assert 50 <= launches <= 200


def test_short_launches_get_long_graphs():
    assert RULES.launches(47, 1.8) == 188
    assert RULES.launches(4, 12.6) == 156  # 2000 us / 12.6 us = 158
    assert RULES.launches(4, 3887.0) == 52
    assert RULES.launches(2410, 0.1) == 2410  # tiny layers: one round


def test_replays_fit_the_time():
    assert RULES.replays(0.001) == 100
    assert RULES.replays(0.01) == 50
    assert RULES.replays(10.0) == 7
    assert QUICK.replays(0.001) == 15


def test_a_timing_is_median_and_tenths():
    found = Timing.of([float(value) for value in range(101)][::-1])
    assert (found.median, found.p10, found.p90, found.replays) == (50.0, 10.0, 90.0, 101)
    assert found.times(4) == Timing(200.0, 40.0, 360.0, 101)


def test_without_a_gpu_it_says_what_is_needed(monkeypatch):
    monkeypatch.setattr(timing.torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"needs an NVIDIA GPU.*--from"):
        timing.GraphCard(RULES)


class FakeNvml:
    """An H200 that does not report its memory clock."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = "sm", "memory", "gpu"

    def __init__(self, driver="580.1"):
        self.driver = driver

    def nvmlInit(self):
        if self.driver is None:
            raise RuntimeError("Driver Not Loaded")

    def nvmlSystemGetDriverVersion(self):
        return self.driver

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-1234":
            raise RuntimeError("Not Found")
        return "card"

    def nvmlDeviceGetClockInfo(self, card, clock):
        if clock == "memory":
            raise RuntimeError("Not Supported")
        return 1755

    def nvmlDeviceGetMaxClockInfo(self, card, clock):
        return 1980

    def nvmlDeviceGetPowerUsage(self, card):
        return 612_345

    def nvmlDeviceGetPowerManagementLimit(self, card):
        return 700_000

    def nvmlDeviceGetTemperature(self, card, sensor):
        return 61

    def nvmlDeviceGetTotalEnergyConsumption(self, card):
        return 5_432_100


@pytest.fixture
def card(monkeypatch):
    """`card(library, uuid)`: what this machine has from now on."""

    def make(library, uuid="1234"):
        nvml.library.cache_clear()
        monkeypatch.setitem(sys.modules, "pynvml", library)
        found = SimpleNamespace(uuid=uuid)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    yield make
    nvml.library.cache_clear()


def test_readings_are_in_mhz_watts_and_degrees(card):
    card(FakeNvml())
    assert nvml.driver_version() == "580.1"
    assert nvml.readings(torch.device("cuda")) == {
        "sm_mhz": 1755,
        "memory_mhz": None,
        "most_sm_mhz": 1980,
        "watts": 612.345,
        "limit_watts": 700.0,
        "celsius": 61,
    }


def test_energy_is_in_joules(card):
    card(FakeNvml())
    assert nvml.joules(torch.device("cuda")) == 5432.1
    assert nvml.joules(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("library", "uuid"), [(None, "1234"), (FakeNvml(driver=None), "1234"), (FakeNvml(), "5")]
)
def test_without_library_driver_or_card_readings_are_unknown(card, library, uuid):
    card(library, uuid)  # None in sys.modules: not installed
    assert nvml.readings(torch.device("cuda")) is None
    assert nvml.joules(torch.device("cuda")) is None
    assert nvml.driver_version() == (None if uuid == "1234" else "580.1")
