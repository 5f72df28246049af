"""Pre-LN against the naive loop and against Hugging Face's Llama."""

from __future__ import annotations

import pytest

from depthbench import build_model
from tests.oracles import pre_ln
from tests.oracles.compare import assert_equals_oracle, assert_near, gradients, randomise, some_tokens

SMALL = dict(n_layer=2, d_model=16, n_head=4, vocab_size=13, d_ff=24)


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_equals_the_oracle_with_all_gradients(n_kv_head, qk_norm):
    model = randomise(build_model("pre_ln", **SMALL, n_kv_head=n_kv_head, qk_norm=qk_norm).double())
    assert_equals_oracle(model, pre_ln.logits, 1e-12)


@pytest.mark.parametrize("n_kv_head", [4, 2])
def test_weights_of_hugging_face_llama_give_its_logits_and_gradients(n_kv_head):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=32, num_attention_heads=4, num_key_value_heads=n_kv_head, intermediate_size=48, vocab_size=29,
        rms_norm_eps=1e-6, tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    llama = randomise(transformers.LlamaForCausalLM(config), spread=0.1)
    model = build_model("pre_ln", n_layer=3, d_model=32, n_head=4, n_kv_head=n_kv_head, d_ff=48, vocab_size=29)
    model.load_state_dict({ours(name): weight for name, weight in llama.state_dict().items()})

    tokens = some_tokens(model, length=32)
    actual, expected = model(tokens), llama(input_ids=tokens).logits
    assert_near(actual, expected, 1e-5)
    mine = gradients(actual, dict(model.named_parameters()))
    for name, gradient in gradients(expected, dict(llama.named_parameters())).items():
        assert_near(mine[ours(name)], gradient, 1e-4, name)


def ours(name: str) -> str:
    """Our name of a weight of LlamaForCausalLM."""
    renames = {
        "lm_head.": "head.",
        "model.embed_tokens.": "embedding.",
        "model.norm.": "final_norm.",
        "model.layers.": "blocks.",
        "input_layernorm": "attention.norm",
        "post_attention_layernorm": "feed_forward.norm",
        "self_attn.": "attention.core.",
        "mlp.": "feed_forward.core.",
    }
    for theirs, mine in renames.items():
        name = name.replace(theirs, mine)
    return name
