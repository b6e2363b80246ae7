"""The streaming decoder against a plain one that decodes everything at once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pega_omni_plugin.models.qwen3_tts import tiny
from pega_omni_plugin.models.qwen3_tts.config import CodecConfig, read_config
from pega_omni_plugin.models.qwen3_tts.decoder import CodecDecoder
from pega_omni_plugin.nn.checkpoint import CheckpointError, Weights

FRAMES = 21  # more than twice the window of 8
TIGHT = {"rtol": 0, "atol": 1e-11}


class Plain:
    """The decoder's equations, one after the other, in float64: [frames, groups] to [samples]."""

    def __init__(self, config: CodecConfig, folder: Path) -> None:
        self.config = config
        self.w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}

    def conv(self, name: str, x: Tensor, dilation: int = 1, groups: int = 1) -> Tensor:
        weight = self.w[f"{name}.weight"]
        padded = F.pad(x, ((weight.shape[2] - 1) * dilation, 0))
        return F.conv1d(padded, weight, self.w[f"{name}.bias"], dilation=dilation, groups=groups)

    def upsample(self, name: str, x: Tensor, rate: int) -> Tensor:
        y = F.conv_transpose1d(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"], stride=rate)
        return y[..., : x.shape[-1] * rate]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def snake(self, name: str, x: Tensor) -> Tensor:
        alpha, beta = (self.w[f"{name}.{part}"].exp()[:, None] for part in ("alpha", "beta"))
        return x + torch.sin(alpha * x) ** 2 / (beta + 1e-9)

    def norm(self, name: str, x: Tensor) -> Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(mean + self.config.transformer.eps) * self.w[f"{name}.weight"]

    def quantizer(self, codes: Tensor) -> Tensor:
        total = torch.zeros(1, self.config.codebook_dim, len(codes), dtype=torch.float64)
        for group, chosen in (("rvq_first", codes[:, :1]), ("rvq_rest", codes[:, 1:])):
            name = f"decoder.quantizer.{group}"
            vectors = torch.zeros(())
            for number, book in enumerate(chosen.T):
                layer = f"{name}.vq.layers.{number}._codebook"
                usage = self.w[f"{layer}.cluster_usage"].clamp(min=1e-5)
                vectors = vectors + (self.w[f"{layer}.embedding_sum"] / usage[:, None])[book]
            total += F.conv1d(vectors.T[None], self.w[f"{name}.output_proj.weight"])
        return total

    def rotate(self, x: Tensor) -> Tensor:
        """[heads, frames, head_dim]: rotary embedding, halves paired."""
        half = x.shape[-1] // 2
        powers = torch.arange(half, dtype=torch.float32) / half
        angles = torch.arange(x.shape[1])[:, None] * (1.0 / self.config.transformer.rope_theta**powers).double()
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    def attention(self, name: str, x: Tensor) -> Tensor:
        dims = self.config.transformer
        frames = len(x)
        q, k, v = (
            self.linear(f"{name}.{part}_proj", x).view(frames, -1, dims.head_dim).transpose(0, 1) for part in "qkv"
        )
        k, v = (each.repeat_interleave(dims.heads // dims.kv_heads, 0) for each in (k, v))
        age = torch.arange(frames)[:, None] - torch.arange(frames)
        scores = self.rotate(q) @ self.rotate(k).transpose(1, 2) / dims.head_dim**0.5
        scores = scores.masked_fill((age < 0) | (age >= self.config.window), -torch.inf)
        return self.linear(f"{name}.o_proj", (scores.softmax(-1) @ v).transpose(0, 1).reshape(frames, -1))

    def transformer(self, x: Tensor) -> Tensor:
        name = "decoder.pre_transformer"
        x = self.linear(f"{name}.input_proj", x)
        for number in range(self.config.transformer.layers):
            layer = f"{name}.layers.{number}"
            y = self.attention(f"{layer}.self_attn", self.norm(f"{layer}.input_layernorm", x))
            x = x + self.w[f"{layer}.self_attn_layer_scale.scale"] * y
            y = self.norm(f"{layer}.post_attention_layernorm", x)
            y = F.silu(self.linear(f"{layer}.mlp.gate_proj", y)) * self.linear(f"{layer}.mlp.up_proj", y)
            x = x + self.w[f"{layer}.mlp_layer_scale.scale"] * self.linear(f"{layer}.mlp.down_proj", y)
        return self.linear(f"{name}.output_proj", self.norm(f"{name}.norm", x))

    def convnext(self, name: str, x: Tensor) -> Tensor:
        latent = self.config.latent
        y = self.conv(f"{name}.dwconv.conv", x, groups=latent).transpose(1, 2)
        y = F.layer_norm(y, (latent,), self.w[f"{name}.norm.weight"], self.w[f"{name}.norm.bias"], 1e-6)
        y = self.linear(f"{name}.pwconv2", F.gelu(self.linear(f"{name}.pwconv1", y)))
        return x + (self.w[f"{name}.gamma"] * y).transpose(1, 2)

    def decode(self, codes: Tensor) -> Tensor:
        x = self.conv("decoder.pre_conv.conv", self.quantizer(codes))
        x = self.transformer(x[0].T).T[None]
        for number, ratio in enumerate(self.config.upsampling_ratios):
            x = self.upsample(f"decoder.upsample.{number}.0.conv", x, ratio)
            x = self.convnext(f"decoder.upsample.{number}.1", x)
        x = self.conv("decoder.decoder.0.conv", x)
        for number, rate in enumerate(self.config.upsample_rates, start=1):
            block = f"decoder.decoder.{number}.block"
            x = self.upsample(f"{block}.1.conv", self.snake(f"{block}.0", x), rate)
            for unit, dilation in ((2, 1), (3, 3), (4, 9)):
                y = self.conv(f"{block}.{unit}.conv1.conv", self.snake(f"{block}.{unit}.act1", x), dilation)
                x = x + self.conv(f"{block}.{unit}.conv2.conv", self.snake(f"{block}.{unit}.act2", y))
        last = len(self.config.upsample_rates) + 1
        x = self.conv(f"decoder.decoder.{last + 1}.conv", self.snake(f"decoder.decoder.{last}", x))
        return x.clamp(-1, 1).flatten()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3-tts")
    tiny.write(folder)
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> CodecConfig:
    return read_config(folder).codec


@pytest.fixture(scope="module")
def exact(folder: Path, config: CodecConfig) -> CodecDecoder:
    """In float64, where the order of sums does not matter: what differs at all is wrong."""
    return CodecDecoder(config, Weights(folder / "speech_tokenizer", torch.float64), 3)


@pytest.fixture(scope="module")
def codes(config: CodecConfig) -> Tensor:
    """[2, FRAMES, groups]"""
    return torch.randint(
        config.codebook_size, (2, FRAMES, config.quantizers), generator=torch.Generator().manual_seed(1)
    )


@pytest.fixture(scope="module")
def expected(folder: Path, config: CodecConfig, codes: Tensor) -> Tensor:
    """[2, FRAMES * frame_samples]"""
    plain = Plain(config, folder / "speech_tokenizer")
    return torch.stack([plain.decode(row) for row in codes])


def decode(decoder: CodecDecoder, codes: Tensor, slots: list[int], cuts: list[int] | int) -> Tensor:
    """From the start of a stream, in pieces of ``cuts`` frames."""
    where = torch.tensor(slots)
    decoder.reset(where)
    return torch.cat([decoder.decode(piece, where) for piece in torch.split(codes, cuts, 1)], 1)


def test_all_frames_at_once_are_the_plain_decoders_samples(
    exact: CodecDecoder, codes: Tensor, expected: Tensor
) -> None:
    torch.testing.assert_close(decode(exact, codes, [2, 1], FRAMES), expected, **TIGHT)
    assert expected.std() > 0.05


@given(data=st.data())
@settings(deadline=None, max_examples=8)
def test_any_cut_gives_the_same_samples(
    exact: CodecDecoder, codes: Tensor, expected: Tensor, data: st.DataObject
) -> None:
    cuts: list[int] = []
    while (left := FRAMES - sum(cuts)) > 0:
        cuts.append(data.draw(st.integers(1, left)))
    torch.testing.assert_close(decode(exact, codes, [1, 3], cuts), expected, **TIGHT)


def test_float32_is_within_rounding_of_the_plain_decoder(
    folder: Path, config: CodecConfig, codes: Tensor, expected: Tensor
) -> None:
    decoder = CodecDecoder(config, Weights(folder / "speech_tokenizer", torch.float32), 2)
    for cuts in (1, FRAMES):
        samples = decode(decoder, codes, [1, 2], cuts)
        assert samples.dtype == torch.float32
        torch.testing.assert_close(samples.double(), expected, rtol=0, atol=2e-5)


def test_bfloat16_follows(folder: Path, config: CodecConfig, codes: Tensor, expected: Tensor) -> None:
    decoder = CodecDecoder(config, Weights(folder / "speech_tokenizer", torch.bfloat16), 2)
    samples = decode(decoder, codes, [1, 2], 1)
    assert samples.dtype == torch.bfloat16
    noise = (samples.double() - expected).square().mean() / expected.square().mean()
    assert -10 * noise.log10() > 25  # dB; the official decoder in bfloat16 has 26 on these weights


def test_a_slot_hears_nothing_of_others(exact: CodecDecoder, codes: Tensor, expected: Tensor) -> None:
    """One stream beside another that begins later, in changing rows and beside padding."""
    one, two, pad = codes[0], codes[1], torch.zeros_like(codes[0, :1])
    exact.reset(torch.tensor([1, 2]))
    heard: dict[int, list[Tensor]] = {1: [], 2: []}
    for frame in range(FRAMES):
        rows = [(0, pad[0]), (1, one[frame])]
        if frame >= 5:
            rows.insert(frame % 3, (2, two[frame - 5]))
        if frame % 2:
            rows.append((0, one[frame]))
        samples = exact.decode(
            torch.stack([code for _, code in rows])[:, None], torch.tensor([slot for slot, _ in rows])
        )
        for (slot, _), row in zip(rows, samples, strict=True):
            if slot:
                heard[slot].append(row)
    torch.testing.assert_close(torch.cat(heard[1]), expected[0], **TIGHT)
    second = torch.cat(heard[2])
    torch.testing.assert_close(second, expected[1, : len(second)], **TIGHT)


def test_a_stream_after_one_that_went_wrong_is_not_harmed(exact: CodecDecoder, codes: Tensor, expected: Tensor) -> None:
    decode(exact, codes, [1, 2], FRAMES)
    for state in (exact._transformer._ring, *(bank.state for bank in exact._histories._banks)):
        with torch.inference_mode():
            state.fill_(torch.nan)
    torch.testing.assert_close(decode(exact, codes, [1, 2], FRAMES), expected, **TIGHT)
    decode(exact, codes[:1], [0], 1)
    decode(exact, codes[:1], [3], 1)


def test_ids_that_are_no_codes_are_read_as_zero(exact: CodecDecoder, config: CodecConfig, codes: Tensor) -> None:
    odd, zero = codes[:, :3].clone(), codes[:, :3].clone()
    odd[:, :, 0] = torch.tensor([config.codebook_size, 2150, 3071])
    zero[:, :, 0] = 0
    torch.testing.assert_close(decode(exact, odd, [1, 2], 1), decode(exact, zero, [1, 2], 1), **TIGHT)


def test_position_knows_no_end(exact: CodecDecoder, config: CodecConfig, codes: Tensor) -> None:
    """Attention depends on distances only, so a stream of the same frames far on sounds the same."""
    slots, frame = torch.tensor([1]), codes[:1, :1]
    exact.reset(slots)
    for _ in range(60):
        settled = exact.decode(frame, slots)
    with torch.inference_mode():
        exact._transformer._position[1] += config.window * 10**5
    for _ in range(40):
        later = exact.decode(frame, slots)
    torch.testing.assert_close(later, settled, rtol=0, atol=1e-6)
    assert exact._transformer._position[1] > 8 * 10**5


class NoValueRead(TorchDispatchMode):
    """Refuses what would make the host wait for a value: a CUDA graph cannot record it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("frames", [1, 3])
def test_the_host_waits_for_no_value(exact: CodecDecoder, codes: Tensor, frames: int) -> None:
    slots = torch.tensor([1, 2])
    with NoValueRead():
        exact.reset(slots)
        exact.decode(codes[:, :frames], slots)
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            slots[0].item()


def test_heads_of_queries_may_share_keys(folder: Path, config: CodecConfig, codes: Tensor, tmp_path: Path) -> None:
    tensors = load_file(folder / "speech_tokenizer" / "model.safetensors")
    head_dim = config.transformer.head_dim
    for name in list(tensors):
        if name.startswith("decoder.") and name.endswith(("k_proj.weight", "v_proj.weight")):
            tensors[name] = tensors[name][:head_dim].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    shared = dataclasses.replace(config, transformer=dataclasses.replace(config.transformer, kv_heads=1))

    samples = decode(CodecDecoder(shared, Weights(tmp_path, torch.float64), 1), codes[:1, :10], [1], 5)

    torch.testing.assert_close(samples[0], Plain(shared, tmp_path).decode(codes[0, :10]), **TIGHT)


def test_a_tensor_of_another_shape_is_named(folder: Path, config: CodecConfig) -> None:
    weights = Weights(folder / "speech_tokenizer", torch.float32)
    for wrong, name in (
        (dataclasses.replace(config, codebook_dim=30), "quantizer.rvq_first.output_proj"),
        (dataclasses.replace(config, latent=62), "pre_conv"),
        (dataclasses.replace(config, channels=32), "decoder.decoder.0"),
        (dataclasses.replace(config, upsampling_ratios=(4, 1)), "upsample.0"),
        (dataclasses.replace(config, upsample_rates=(5, 8, 4, 3)), "decoder.1.block.1"),
    ):
        with pytest.raises(CheckpointError, match=name):
            CodecDecoder(wrong, weights, 1)


def test_a_decoder_that_does_not_upsample_is_refused(folder: Path, config: CodecConfig) -> None:
    with pytest.raises(CheckpointError, match="upsample_rates: expected at least one"):
        CodecDecoder(
            dataclasses.replace(config, upsample_rates=()), Weights(folder / "speech_tokenizer", torch.float32), 1
        )
