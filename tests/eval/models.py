"""Weights on a mesh for the evaluation tests: a random decoder, and one whose logits are a table of the last token."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from maxtext.config.schema import ModelConfig
from maxtext.model.decoder import Decoder, abstract_decoder, init_decoder


def random_decoder(model: ModelConfig, mesh: Mesh, seed: int = 0) -> Decoder:
    with jax.set_mesh(mesh):
        return init_decoder(model, jax.random.key(seed))


def table_decoder(model: ModelConfig, mesh: Mesh, embed_VD: np.ndarray, head_DV: np.ndarray) -> Decoder:
    """Blocks whose output norms are zero add nothing, so that logits are rms_norm(embed[token]) @ head."""
    blank = jax.tree_util.tree_map_with_path(
        lambda path, x: np.zeros(x.shape, x.dtype) if path[-1].name.endswith("_norm") else np.ones(x.shape, x.dtype),
        abstract_decoder(model, mesh))
    whole = blank.replace(embed=embed_VD, head=head_DV)
    return jax.tree.map(lambda array, want: jax.device_put(array, want.sharding), whole, abstract_decoder(model, mesh))
