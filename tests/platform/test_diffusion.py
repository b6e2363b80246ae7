"""Diffusion on CPU: attention by vLLM-Omni's own layer, and the executor that hangs is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata
from vllm_omni.diffusion.attention.layer import Attention

from pega_omni_plugin.platform.diffusion import CpuDiffusionWorker, CpuSdpaImpl
from pega_omni_plugin.platform.omni_cpu import CpuOmniPlatform

BATCH, ROWS, KEYS, HEADS, WIDTH = 2, 5, 5, 4, 16


def tensors(kv_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(kv_heads)
    query = torch.randn(BATCH, ROWS, HEADS, WIDTH, generator=draw)
    key, value = torch.randn(2, BATCH, KEYS, kv_heads, WIDTH, generator=draw)
    return query, key, value


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_attends_as_plain_pytorch_does(kv_heads: int, causal: bool) -> None:
    layer = Attention(num_heads=HEADS, head_size=WIDTH, causal=causal, softmax_scale=0.3, num_kv_heads=kv_heads)
    assert type(layer.attention) is CpuSdpaImpl
    query, key, value = tensors(kv_heads)
    expected = functional.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2).repeat_interleave(HEADS // kv_heads, dim=1),
        value.transpose(1, 2).repeat_interleave(HEADS // kv_heads, dim=1),
        is_causal=causal,
        scale=0.3,
    ).transpose(1, 2)
    torch.testing.assert_close(layer(query, key, value), expected)


def test_masked_keys_do_not_count() -> None:
    layer = Attention(num_heads=HEADS, head_size=WIDTH, causal=False, softmax_scale=0.3)
    query, key, value = tensors(HEADS)
    mask = torch.tensor([[True, True, True, False, False], [True] * KEYS])
    masked = layer(query, key, value, AttentionMetadata(attn_mask=mask))
    torch.testing.assert_close(masked[0], layer(query[:1], key[:1, :3], value[:1, :3])[0])
    torch.testing.assert_close(masked[1], layer(query, key, value)[1])


def test_another_attention_is_refused_with_the_key_to_set() -> None:
    with pytest.raises(ValueError, match=r"'FLASH_ATTN' .*`diffusion_attention_config`"):
        CpuOmniPlatform.get_diffusion_attn_backend_cls("FLASH_ATTN", head_size=64)
    assert CpuOmniPlatform.get_diffusion_attn_backend_cls("torch_sdpa", head_size=64).endswith(".CpuSdpaBackend")


@pytest.mark.parametrize(("executor", "devices"), [("mp", 1), (None, 2)])
def test_worker_processes_are_refused_with_the_key_to_set(executor: str | None, devices: int) -> None:
    config = SimpleNamespace(distributed_executor_backend=executor, num_gpus=devices)
    with pytest.raises(NotImplementedError, match=r"distributed_executor_backend: mp .*`uni`"):
        CpuDiffusionWorker(local_rank=0, rank=0, od_config=config)
