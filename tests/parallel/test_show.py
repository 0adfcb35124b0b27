"""How trees print: what is told of arrays, of their declarations, inside a traced function, and of what is no array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from maxtext.model.decoder import abstract_decoder, decoder_params, leaf_names
from maxtext.parallel.sharding import sharding
from maxtext.parallel.show import size_text, tree_text
from tests.tiny import mesh_of, tiny_model


def rows(text: str) -> dict[str, str]:
    return {row.split()[0]: " ".join(row.split()[1:]) for row in text.splitlines()[1:]}


def test_abstract_weights_name_the_axes_that_split_them():
    shown = rows(repr(abstract_decoder(tiny_model(), mesh_of((2, 2, 2)))))
    assert shown["embed"] == "float32[96@tensor,32@fsdp] 12.0 KiB"
    assert shown["segments.0.0.attention_norm"] == "float32[1,32] 128 B"
    both = rows(repr(abstract_decoder(tiny_model(), mesh_of((1, 2, 2), expert=2))))
    assert both["embed"] == "float32[96@tensor,32@(fsdp,expert)] 12.0 KiB"
    assert rows(repr(abstract_decoder(tiny_model(), mesh_of((8, 1, 1)))))["embed"] == "float32[96,32] 12.0 KiB"


def test_declarations_name_their_dims():
    shown = rows(repr(decoder_params(tiny_model())))
    assert shown["embed"] == "normal[vocab 96,embed 32]"
    assert shown["norm"] == "ones[32]"


def test_a_traced_tree_prints_too():
    mesh, seen = mesh_of((1, 4, 2)), []
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.zeros((8, 4), jnp.bfloat16), sharding(mesh, "embed", "vocab"))
        jax.jit(lambda tree: seen.append(tree_text(tree)))({"x": x})
    assert seen == ["dict: 32 values in 1 arrays, 64 B\n  x  bfloat16[8@fsdp,4@tensor]  64 B"]


def test_what_is_no_array_shows_as_itself():
    assert rows(repr(leaf_names(decoder_params(tiny_model()))))["embed"] == "'embed'"
    assert tree_text({}) == "dict: 0 values in 0 arrays, 0 B"


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 40, "3.0 TiB"),
                                            (5 << 52, "20480.0 TiB"), (None, "")])
def test_sizes_are_told_in_their_own_unit(size, text):
    assert size_text(size) == text
