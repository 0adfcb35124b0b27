"""Parameters and FLOPs of published models, counted by hand from their shapes, against what is derived from `Param`s.

Each row writes out the weights of one layer's attention and feed-forward as its paper and config.json give them.
"""

from __future__ import annotations

import dataclasses
import re

import pytest

from maxtext.cli import train
from maxtext.config.load import CONFIGS, list_configs, load
from maxtext.config.schema import ModelConfig
from maxtext.model.cost import count_non_embedding, count_params, flops_per_token

LENGTH = 8192


@dataclasses.dataclass(frozen=True)
class Hand:
    """A decoder in numbers.

    Attributes:
      attention: parameters of one layer's attention.
      feeds: (layers, parameters of their feed-forward, parameters that one token uses).
      heads, widths: query heads; width of a query plus width of a value.
      windows: (layers, tokens that they see).
      norms: norms of a block outside attention.
    """

    width: int
    vocab: int
    attention: int
    feeds: tuple[tuple[int, int, int], ...]
    heads: int
    widths: int
    windows: tuple[tuple[int, int], ...] = ()
    norms: int = 2
    tied: bool = False

    @property
    def layers(self) -> int:
        return sum(layers for layers, _, _ in self.feeds)

    def parameters(self, active: bool) -> int:
        feeds = sum(layers * (used if active else whole) for layers, whole, used in self.feeds)
        tables = (1 if self.tied else 2) * self.vocab * self.width
        return tables + self.layers * (self.attention + self.norms * self.width) + feeds + self.width

    def flops(self, length: int) -> int:
        """Six a weight that a token uses, without the embedding and the norms of blocks, and attention's own."""
        weights = self.layers * self.attention + sum(layers * used for layers, _, used in self.feeds)
        full = self.layers - sum(layers for layers, _ in self.windows)
        seen = [(full, length), *((layers, min(window, length)) for layers, window in self.windows)]
        # A query sees w - w (w - 1) / 2T positions on average; pairs is 2T times their sum over layers.
        pairs = sum(layers * w * (2 * length - w + 1) for layers, w in seen)
        return 6 * (weights + self.vocab * self.width + self.width) + 3 * self.heads * self.widths * pairs // length


def dense(layers: int, weights: int) -> tuple[tuple[int, int, int], ...]:
    return ((layers, weights, weights),)


def routed(layers: int, experts: int, top_k: int, expert: int, router: int, shared: int = 0
           ) -> tuple[tuple[int, int, int], ...]:
    return ((layers, experts * expert + router + shared, top_k * expert + router + shared),)


LLAMA3 = Hand(4096, 128_256, 2 * 4096 * 4096 + 2 * 4096 * 1024, dense(32, 3 * 4096 * 14_336), 32, 256)
HAND = {
    "llama2_7b": Hand(4096, 32_000, 4 * 4096 * 4096, dense(32, 3 * 4096 * 11_008), 32, 256),
    "llama3_8b": LLAMA3,
    "llama31_8b": LLAMA3,
    "llama3_70b": Hand(8192, 128_256, 2 * 8192 * 8192 + 2 * 8192 * 1024, dense(80, 3 * 8192 * 28_672), 64, 256),
    "qwen25_7b": Hand(3584, 152_064, 2 * 3584 * 3584 + 2 * 3584 * 512 + 3584 + 2 * 512, dense(28, 3 * 3584 * 18_944),
                      28, 256),
    "qwen3_0b6": Hand(1024, 151_936, 2 * 1024 * 2048 + 2 * 1024 * 1024 + 2 * 128, dense(28, 3 * 1024 * 3072), 16, 256,
                      tied=True),
    "qwen3_8b": Hand(4096, 151_936, 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 128, dense(36, 3 * 4096 * 12_288), 32, 256),
    "mistral_7b": Hand(4096, 32_000, 2 * 4096 * 4096 + 2 * 4096 * 1024, dense(32, 3 * 4096 * 14_336), 32, 256,
                       windows=((32, 4096),)),
    "gemma3_1b": Hand(1152, 262_144, 2 * 1152 * 1024 + 2 * 1152 * 256 + 2 * 256, dense(26, 3 * 1152 * 6912), 4, 512,
                      windows=((22, 512),), norms=4, tied=True),
    "gemma3_4b": Hand(2560, 262_208, 2 * 2560 * 2048 + 2 * 2560 * 1024 + 2 * 256, dense(34, 3 * 2560 * 10_240), 8, 512,
                      windows=((29, 1024),), norms=4, tied=True),
    "gemma3_12b": Hand(3840, 262_208, 2 * 3840 * 4096 + 2 * 3840 * 2048 + 2 * 256, dense(48, 3 * 3840 * 15_360), 16,
                       512, windows=((40, 1024),), norms=4, tied=True),
    "olmo2_7b": Hand(4096, 100_352, 4 * 4096 * 4096 + 2 * 4096, dense(32, 3 * 4096 * 11_008), 32, 256),
    "smollm2_135m": Hand(576, 49_152, 2 * 576 * 576 + 2 * 576 * 192, dense(30, 3 * 576 * 1536), 9, 128, tied=True),
    "mixtral_8x7b": Hand(4096, 32_000, 2 * 4096 * 4096 + 2 * 4096 * 1024,
                         routed(32, 8, 2, 3 * 4096 * 14_336, 4096 * 8), 32, 256),
    "olmoe_1b_7b": Hand(2048, 50_304, 4 * 2048 * 2048 + 2 * 2048, routed(16, 64, 8, 3 * 2048 * 1024, 2048 * 64), 16,
                        256),
    "olmo3_moe_1b_7b": Hand(2048, 100_352, 4 * 2048 * 2048 + 2 * 2048,
                            routed(16, 64, 8, 3 * 2048 * 1024, 2048 * 64), 16, 256, windows=((12, 4096),)),
    "qwen3_30b_a3b": Hand(2048, 151_936, 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128,
                          routed(48, 128, 8, 3 * 2048 * 768, 2048 * 128), 32, 256),
    # Queries straight from the input, 16 heads of 128 + 64; keys and values through 512, the rotary key beside it.
    "deepseek_v2_lite": Hand(
        2048, 102_400, 2048 * 16 * 192 + 2048 * (512 + 64) + 512 + 512 * 16 * (128 + 128) + 16 * 128 * 2048,
        dense(1, 3 * 2048 * 10_944) + routed(26, 64, 6, 3 * 2048 * 1408, 2048 * 64, 3 * 2048 * 2816), 16, 192 + 128),
    "deepseek_v3": Hand(
        7168, 129_280, 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
        + 128 * 128 * 7168,
        dense(3, 3 * 7168 * 18_432) + routed(58, 256, 8, 3 * 7168 * 2048, 7168 * 256, 3 * 7168 * 2048), 128, 192 + 128),
    # Biases on all four projections, on the router and in the experts; one sink a head.
    "gpt_oss_20b": Hand(
        2880, 201_088, 2880 * 64 * (64 + 2 * 8) + 64 * (64 + 2 * 8) + 64 * 64 * 2880 + 2880 + 64,
        routed(24, 32, 4, 3 * 2880 * 2880 + 2 * 2880 + 2880, 2880 * 32 + 32), 64, 128, windows=((12, 128),)),
}
# All parameters, as counted in the published files. DeepSeek-V3: without its layer that predicts one token further,
# and without the 58 x 256 entries of its routers' bias, which no gradient trains.
TOTALS = {
    "llama2_7b": 6_738_415_616, "llama3_8b": 8_030_261_248, "llama31_8b": 8_030_261_248, "llama3_70b": 70_553_706_496,
    "qwen25_7b": 7_615_616_512, "qwen3_0b6": 596_049_920, "qwen3_8b": 8_190_735_360, "mistral_7b": 7_241_732_096,
    "gemma3_1b": 999_885_952, "gemma3_4b": 3_880_263_168, "gemma3_12b": 11_766_034_176, "olmo2_7b": 7_298_617_344,
    "smollm2_135m": 134_515_008, "mixtral_8x7b": 46_702_792_704, "olmoe_1b_7b": 6_919_161_856,
    "qwen3_30b_a3b": 30_532_122_624, "deepseek_v2_lite": 15_706_484_224, "deepseek_v3": 671_026_404_352,
    "gpt_oss_20b": 20_914_757_184,
}
# Billions that a token uses, as their authors round them; some leave the input embedding out.
ACTIVE = {"mixtral_8x7b": (12.9, "with"), "olmoe_1b_7b": (1.3, "with"), "qwen3_30b_a3b": (3.3, "with"),
          "deepseek_v2_lite": (2.4, "without"), "deepseek_v3": (37, "without"), "gpt_oss_20b": (3.6, "without")}
MODELS = sorted(file.stem for file in (CONFIGS / "models").glob("*.yml"))


SMALL = ("data.prepared=anywhere", "data.sequence_length=8192", "optim.lr=1e-3", "train.steps=10",
         "train.global_batch=64")


def model(name: str) -> ModelConfig:
    """A model part, with settings on the command line that make a run of it."""
    return load(f"models/{name}", SMALL).model


def test_every_row_is_a_model_part():
    assert set(HAND) <= set(MODELS)
    assert set(TOTALS) == set(HAND) - {"olmo3_moe_1b_7b"}  # which is ours


@pytest.mark.parametrize("name", TOTALS)
def test_the_hand_count_is_the_published_one(name):
    assert HAND[name].parameters(active=False) == TOTALS[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_the_hand_count_of_a_token_is_the_published_one(name):
    billions, embedding = ACTIVE[name]
    hand = HAND[name]
    count = hand.parameters(active=True) - (0 if embedding == "with" else hand.vocab * hand.width)
    assert abs(count / 1e9 - billions) < (0.06 if billions < 20 else 0.5), count


@pytest.mark.parametrize("name", HAND)
def test_a_model_part_counts_as_by_hand(name):
    cfg, hand = model(name), HAND[name]
    for active in (False, True):
        assert count_params(cfg, active) == hand.parameters(active)
        assert count_non_embedding(cfg, active) == hand.parameters(active) - hand.vocab * hand.width
    for length in (LENGTH, 256):
        assert flops_per_token(cfg, length) == hand.flops(length)


@pytest.mark.parametrize("name", HAND)
def test_a_dry_run_of_a_model_part_prints_the_hand_count(name, capsys):
    assert train([f"models/{name}", *SMALL, "--dry-run", "--devices", "64"]) == 0
    out, hand = " ".join(capsys.readouterr().out.split()), HAND[name]
    whole, active, embedding = hand.parameters(False), hand.parameters(True), hand.vocab * hand.width
    counts = f"{whole:,} ({whole - embedding:,} without the embedding)"
    if active != whole:
        counts = (f"{whole:,} ({active:,} active); {whole - embedding:,} without the embedding "
                  f"({active - embedding:,} active)")
    assert f"parameters {counts} FLOPs {hand.flops(8192) / 1e9:,.3f} GFLOP/token at sequence 8,192;" in out
    assert "mesh data 1, fsdp 64, tensor 1 (planned) memory about" in out


@pytest.mark.parametrize("name", MODELS)
def test_a_model_part_states_its_parameters(name):
    cfg = model(name)
    [stated] = re.findall(r"(\S+) parameters", dict(list_configs(CONFIGS / "models"))[name])
    assert stated == f"{count_params(cfg):,}"
