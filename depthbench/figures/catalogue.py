"""What there is to see of a run's layers: every probe's figures, with the sentence that helps to read one and the definition behind it.

Texts are HTML without tags other than sub, sup, i and b.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from depthbench.figures import probes


@dataclass(frozen=True)
class Drawing:
    """One figure: ``name`` (of its files and anchors), its title, how to read it, and the function of `probes` that draws it.

    ``metrics`` are the rows it shows; ``shown`` makes the table of exactly what is shown from a run's rows where these are not it.
    """

    name: str
    title: str
    reading: str
    metrics: tuple[str, ...]
    draw: Callable[..., go.Figure]
    shown: Callable[[pd.DataFrame], pd.DataFrame] | None = None


@dataclass(frozen=True)
class Probe:
    """A probe of the store (``name``), how it is defined, and its figures."""

    name: str
    title: str
    definition: str
    drawings: tuple[Drawing, ...]

    def table(self, drawing: Drawing, rows: pd.DataFrame) -> pd.DataFrame:
        """Exactly what the figure shows of ``rows``; empty where they have nothing for it."""
        if drawing.shown:
            return drawing.shown(rows)
        kept = [name for name in ("metric", "i", "j", "value", "n_tokens", "rule") if name in rows]
        table = probes.of_probe(rows, self.name, drawing.metrics)[kept]
        empty = [name for name in table if name != "value" and table[name].isna().all()]  # values may all be NaN, and are still values
        return table.drop(columns=empty).astype({name: "Int64" for name in ("i", "j") if table[name].notna().any()})


PROBES = (
    Probe(
        "angular",
        "Angular distance",
        "d(i, j) = mean over tokens of ∠(z<sub>i</sub>, z<sub>j</sub>) / π, between the depth states z<sub>0</sub> (the embedding) to "
        "z<sub>L</sub>: 0 the same direction, 0.5 orthogonal, 1 opposite.",
        (
            Drawing(
                "angular",
                "Angular distance between depth states",
                "Dark squares along the diagonal are stretches of blocks that hardly turn the state; where the colour changes, the work "
                "is done.",
                ("distance",),
                probes.angular,
            ),
        ),
    ),
    Probe(
        "causal",
        "Causal score",
        "C(s, l) = mean ‖(z̃<sub>l+1</sub> − z̃<sub>l</sub>) − (z<sub>l+1</sub> − z<sub>l</sub>)‖ / mean ‖z<sub>l+1</sub> − "
        "z<sub>l</sub>‖ for l > s, with the states z̃ of the model without block s; means are over tokens. Late pairs: both blocks in "
        "the last three quarters (index ≥ L/4, framed), the fraction with C &gt; 0.45. Mean: (1/√L) (1/L) Σ<sub>s</sub> "
        "mean<sub>l&gt;s</sub> C(s, l).",
        (
            Drawing(
                "causal",
                "Causal map: what later blocks lose without block s",
                "A bright cell says that block l builds on block s; a dark row is a block whose work no later block uses.",
                ("score",),
                probes.causal,
            ),
        ),
    ),
    Probe(
        "permutation",
        "Permutation score",
        "P(i, j) = |loss − loss with blocks i and j swapped| / loss. Late pairs: both blocks in the last three quarters (index ≥ L/4, "
        "framed), the fraction with P &gt; 0.15.",
        (
            Drawing(
                "permutation",
                "Permutation map: what swapping two blocks costs",
                "Dark cells are blocks that could change places without harm: the order of the two computes nothing.",
                ("score",),
                probes.permutation,
            ),
        ),
    ),
    Probe(
        "pruning",
        "Layer-skip ablation",
        "Δ(l) = loss with block l skipped − loss, in nats per token.",
        (
            Drawing(
                "pruning",
                "Pruning: what the loss rises by without one block",
                "A bar near zero is a block that could be left out; a bar below zero one that does harm.",
                ("delta",),
                probes.pruning,
            ),
        ),
    ),
    Probe(
        "logit_lens",
        "Logit lens",
        "The single-stream readout of each z<sub>l</sub> through the final norm and the head: its cross entropy, KL(final ‖ l), and the "
        "share of the final top-5 tokens that are among its own top 5. At l = L: the model's own loss, 0 and 1.",
        (
            Drawing(
                "logit_lens",
                "Logit lens: how early the prediction is there",
                "Where the curves flatten the prediction stands; a fall that goes on to the last block says that depth is used to the end.",
                ("loss", "kl", "top5_overlap"),
                probes.logit_lens,
            ),
        ),
    ),
    Probe(
        "usefulness",
        "Usefulness",
        "The loss with block l replaced by the affine map that ridge regression (λ = 10<sup>−3</sup> times the mean diagonal of XᵀX) "
        "fits from its input to its output states on half of the windows, over the loss, on the other half. Useful: above 1.1.",
        (
            Drawing(
                "usefulness",
                "Usefulness: is a block more than an affine map?",
                "A ratio near 1 (faint) is a block that a linear layer could replace; above the line it computes something.",
                ("loss_ratio",),
                probes.usefulness,
            ),
        ),
    ),
    Probe(
        "jacobian",
        "Jacobian deviation",
        "‖J<sub>l</sub> − I‖<sub>F</sub> / √d, J<sub>l</sub> the mean over positions of the derivative of the summed block output by "
        "the block input at a position. Error bars: the standard error of a Hutchinson estimate, where d is too large to be exact.",
        (
            Drawing(
                "jacobian",
                "Jacobian deviation: how far from the identity a block is",
                "Near 0 a block passes its input on; the larger, the more it changes what a small change of its input does.",
                ("deviation", "stderr"),
                probes.jacobian,
            ),
        ),
    ),
    Probe(
        "collapse",
        "Token collapse",
        "From the singular values s of a window's token matrix at z<sub>l</sub> (T × d, not centred): stable rank Σs² / max s², "
        "effective rank exp H(s² / Σs²), and Σs / √Σs²; averaged over windows.",
        (
            Drawing(
                "collapse",
                "Token collapse: how many directions the tokens of a window fill",
                "A curve that falls towards 1 says that the tokens grow alike as depth goes on.",
                ("stable_rank", "effective_rank", "nuclear_ratio"),
                probes.collapse,
            ),
        ),
    ),
    Probe(
        "paths",
        "Residual path weights",
        "W(i, l): the weight of source i (0 the embedding, i ≥ 1 the output of sublayer i − 1) in the input that sublayer l reads (l = "
        "2L: the readout), averaged over tokens, such that Σ<sub>i</sub> W(i, l) f<sub>i</sub> is that input before its norm.",
        (
            Drawing(
                "paths",
                "Path weights: what each sublayer reads from each earlier one",
                "A row that fades to the right is an output that later sublayers hear less and less; a column shows what one sublayer "
                "mixes.",
                ("weight",),
                probes.paths,
            ),
        ),
    ),
    Probe(
        "transport",
        "Residual transport",
        "Hyper-connections: per token the residual mixing composed from boundary a to boundary b; its effective rank exp H(s² / Σs²), its "
        "singular values s, and the mean |cosine| of pairs of its columns, then means over tokens. Attention residuals: the softmax "
        "weights over the sources that each sublayer reads; the dead segment is how many first blocks give the running sum less than 0.01.",
        (
            Drawing(
                "transport_rank",
                "Transport: how many streams still differ after the mixings from a to b",
                "A rank near 1 says that the streams have become copies of one; the number of streams, that they were kept apart.",
                ("effective_rank",),
                probes.transport_rank,
            ),
            Drawing(
                "transport_spectrum",
                "Transport: singular values over the distance that is composed",
                "Lines that part with distance say that the mixings forget all but one direction; a band goes from the least to the "
                "largest of the pairs.",
                ("singular_value",),
                probes.transport_spectrum,
                probes.spectrum,
            ),
            Drawing(
                "transport_overlap",
                "Transport: how alike the columns of the composed mixing are",
                "Near 1 all streams end up the same whatever they began as; near 0 each keeps its own direction.",
                ("column_cosine",),
                probes.transport_overlap,
            ),
            Drawing(
                "depth_weights",
                "Depth weights: which earlier sources each sublayer attends to",
                "Bright rows are sources that many sublayers read; left of the dashed line, if there is one, the running sum is unread.",
                ("depth_weight",),
                probes.depth_weights,
            ),
            Drawing(
                "running_weight",
                "Weight of the running sum",
                "Below the line a sublayer does not read what its own group has added so far.",
                ("running_weight",),
                probes.running_weight,
            ),
        ),
    ),
    Probe(
        "norms",
        "Residual norm and cosine drift",
        "mean ‖z<sub>l</sub>‖ / √width; the mean of cos(z<sub>l</sub>, z<sub>l+1</sub>), of which 1 minus it is the drift; and of "
        "cos(z<sub>0</sub>, z<sub>l</sub>).",
        (
            Drawing(
                "norms",
                "Residual norm and cosines over depth",
                "A norm that grows while cosines stay near 1 drowns what late blocks add; a falling cosine with the embedding is how "
                "far they went.",
                ("residual_norm", "cosine_next", "cosine_first"),
                probes.norms,
            ),
        ),
    ),
)
