"""A hierarchical cache keeps the rows of every draft layer, with any draft config."""

import unittest
from types import SimpleNamespace
from unittest.mock import patch

from sglang.srt.speculative import base_spec_worker
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


def _runner(pool, nextn_layers):
    return SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(),
        model_config=SimpleNamespace(num_nextn_predict_layers=nextn_layers),
        spec_algorithm=SpeculativeAlgorithm.EAGLE,
    )


def _plan(pools, nextn_layers):
    """Plan a draft that has a runner per pool."""
    runners = tuple(_runner(pool, nextn_layers) for pool in pools)
    worker = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=_runner(None, nextn_layers)),
        _draft_model_runners=lambda: runners,
    )
    memory = SimpleNamespace(
        enable_hierarchical_cache=True, enable_unified_cache_external_linker=False
    )
    with patch.object(base_spec_worker, "get_memory", lambda: memory):
        return BaseSpecWorker._build_hicache_draft_plan(worker)


class TestHostLayers(unittest.TestCase):
    def test_every_layer_is_kept_without_num_nextn_predict_layers(self):
        pools = tuple(SimpleNamespace(layer=layer) for layer in range(3))
        self.assertEqual(_plan(pools, None).device_pools, pools)

    def test_every_layer_is_kept_with_num_nextn_predict_layers(self):
        pools = tuple(SimpleNamespace(layer=layer) for layer in range(3))
        self.assertEqual(_plan(pools, 3).device_pools, pools)

    def test_the_one_layer_of_a_draft_is_kept(self):
        pools = (SimpleNamespace(layer=0),)
        self.assertEqual(_plan(pools, None).device_pools, pools)


if __name__ == "__main__":
    unittest.main()
