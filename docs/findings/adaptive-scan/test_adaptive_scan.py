"""Verify of a Mamba-2 layer leaves each request's states where the commit looks for them."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.layers.attention.mamba import mamba
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

HEADS, DIM, STATE = 2, 4, 8
CHANNELS = HEADS * DIM + 2 * STATE


def _mixer(projected):
    """A mixer of one group whose convolution and norm do nothing."""
    mixer = MagicMock(spec=mamba.MambaMixer2)
    mixer.intermediate_size = HEADS * DIM
    mixer.conv_dim = CHANNELS
    mixer.num_heads = HEADS
    mixer.head_dim = DIM
    mixer.groups_ssm_state_size = mixer.ssm_state_size = STATE
    mixer.n_groups = mixer.tp_size = 1
    mixer.activation = "silu"
    mixer.A = -torch.ones(HEADS)
    mixer.D = torch.zeros(HEADS)
    mixer.dt_bias = torch.zeros(HEADS)
    mixer.conv1d = SimpleNamespace(weight=torch.zeros(CHANNELS, 1, 4), bias=None)
    mixer.in_proj = lambda _: (projected, None)
    mixer.norm = lambda hidden, gate: hidden
    mixer.out_proj = lambda hidden: (hidden, None)
    return mixer


def _update(state, x, dt, A, B, C, D, **kwargs):
    """selective_state_update in plain torch, after its docstring."""
    buffer = kwargs["intermediate_states_buffer"].flatten(0, 1)
    for request, index in enumerate(kwargs["intermediate_state_indices"].tolist()):
        own = state[kwargs["state_batch_indices"][request]].clone()
        for node in range(x.shape[1]):
            step = torch.nn.functional.softplus(
                dt[request, node] + kwargs["dt_bias"]
            )[..., None]
            own = own * torch.exp(A * step) + step * (
                x[request, node][..., None] * B[request, node]
            )
            buffer[index * kwargs["cache_steps"] + node] = own


def _verify(projected, requests, nodes, longest):
    """Return the buffer, sized for rounds of `longest` nodes, after verify of `nodes`."""
    cache = MagicMock(spec=MambaPool.SpeculativeState)
    cache.conv = [torch.zeros(requests + 1, CHANNELS, 3)]
    cache.temporal = torch.zeros(requests + 1, HEADS, DIM, STATE)
    cache.intermediate_conv_window = [None]
    cache.intermediate_ssm = torch.full(
        (requests + 1, longest, HEADS, DIM, STATE), torch.nan
    )
    metadata = SimpleNamespace(
        mamba_cache_indices=torch.arange(1, requests + 1, dtype=torch.int32),
        query_start_loc=torch.arange(requests + 1, dtype=torch.int32) * nodes,
        num_prefills=0,
        num_prefill_tokens=0,
        num_decodes=requests,
        is_target_verify=True,
        draft_token_num=nodes,
        mixed_metadata=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_parent_token=None,
    )
    with (
        patch.object(
            mamba,
            "causal_conv1d_update_triton",
            lambda x, *args, **kwargs: x,
            create=True,
        ),
        patch.object(mamba, "selective_state_update", _update),
    ):
        mamba.MambaMixer2.forward(
            _mixer(projected),
            hidden_states=projected,
            layer_cache=cache,
            metadata=metadata,
            use_triton_causal_conv=True,
        )
    return cache.intermediate_ssm


class TestStatesOfShortRounds(unittest.TestCase):
    def _assert_states(self, requests, nodes, longest):
        torch.manual_seed(0)
        rows = requests * nodes
        gate, x, keys, queries, steps = (
            torch.randn(rows, width)
            for width in (HEADS * DIM, HEADS * DIM, STATE, STATE, HEADS)
        )
        projected = torch.cat([gate, x, keys, queries, steps], -1)
        found = _verify(projected, requests, nodes, longest)
        for request in range(requests):
            state = torch.zeros(HEADS, DIM, STATE)
            for node in range(nodes):
                row = request * nodes + node
                step = torch.nn.functional.softplus(steps[row])[:, None, None]
                new = x[row].view(HEADS, DIM, 1) * keys[row]
                state = state * torch.exp(-step) + step * new
                with self.subTest(request=request, node=node):
                    self.assertTrue(
                        torch.allclose(found[request, node], state, atol=1e-5)
                    )

    def test_rounds_as_long_as_there_may_be(self):
        self._assert_states(requests=2, nodes=3, longest=3)

    def test_shorter_rounds(self):
        self._assert_states(requests=2, nodes=1, longest=3)
        self._assert_states(requests=3, nodes=2, longest=3)

    def test_one_request(self):
        self._assert_states(requests=1, nodes=1, longest=3)


if __name__ == "__main__":
    unittest.main()
