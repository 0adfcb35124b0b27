"""The private names of JAX that elastic training needs."""

import pytest
from jax._src import distributed

from maxtext.elastic import private


def test_this_version_of_jax_has_them():
    private.check_names()


def test_a_version_without_them_is_refused_by_name(monkeypatch):
    from jax._src.lib import _jax

    monkeypatch.delattr(_jax, "get_distributed_runtime_service")
    monkeypatch.setattr(distributed, "global_state", object())
    with pytest.raises(private.PrivateNamesGone, match=r"get_distributed_runtime_service, .*global_state.client"):
        private.check_names()


def test_an_argument_that_is_gone_is_named(monkeypatch):
    from jax._src.lib import _jax

    def renamed():
        """get_client(address: str, init_timeout: int, shutdown_on_destruction: bool)"""

    monkeypatch.setattr(_jax, "get_distributed_runtime_client", renamed)
    assert private.missing_names() == ["_jax.get_distributed_runtime_client(missed_heartbeat_callback)"]
