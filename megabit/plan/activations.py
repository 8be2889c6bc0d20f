"""What one microbatch takes in memory on a rank, by formula: what autograd keeps of it from F to B,
and the most that there is while F, B and W run.

What is kept is exact: the tensors that the autograd functions of ``model`` and ``tensor_parallel``
save. With T tokens of a microbatch, t of them between layers, c bytes of the compute dtype, and q
and f columns of this rank's heads and feed-forward layer, a ternary layer with SubLN keeps

    norms      2·t·H·c                   their inputs
    products   2·T·H + T·q + T·f         int8 codes of their inputs
    attention  4·T·q·c + 4·T·heads       q; k and v for each query head; y; log Σ e^score
    GLU        3·T·f·c                   gate, up, and their product before SubLN

and a number for each token of every norm and product. Forward and backward passes are played with a
list of the tensors that come and go, in the order of the code. What has no more than a number for
each token and head is left out of it, and so is what layout-exact training has beside that.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megabit.plan.sizes import Sizes

TOKEN_BYTES = 8
"""Of a token: int64."""
FLAG_BYTES = 1


@dataclass(frozen=True)
class Activations:
    """Bytes of one part of the model for one microbatch."""

    kept: int = 0
    """By autograd, from F until the part's backward pass; its input is among it."""
    put_off: int = 0
    """From B until W, where the two are apart: operands of weight gradients."""
    forward: int = 0
    """The most during F. As much of ``kept`` as there is by then is in it."""
    backward: int = 0
    """The most during BW. As much of ``kept`` as is still there is in it."""
    input_gradient: int = 0
    """The same during B, and of ``put_off`` what is there by then."""
    weight_gradient: int = 0
    """The most during W. As much of ``put_off`` as is still there is in it."""


def layer_activations(sizes: Sizes, layer: int) -> Activations:
    """Of a layer, by its index in the model."""
    train = sizes.shape.config.train
    chosen = train.recompute_layers is None or layer in train.recompute_layers
    recompute = train.recompute if chosen else "none"
    forward = _Layer(sizes, recompute)
    forward.forward()
    return Activations(
        kept=forward.kept,
        put_off=forward.put_off,
        forward=forward.tape.peak,
        backward=_backward_peak(sizes, recompute, puts_off=False),
        input_gradient=_backward_peak(sizes, recompute, puts_off=True),
        weight_gradient=_weights_peak(sizes),
    )


def embedding_activations(sizes: Sizes) -> Activations:
    """Of the embedding, where the rank has the first stage: its output is the next part's."""
    tokens, hidden = sizes.tokens, sizes.whole_hidden
    kept = tokens * (TOKEN_BYTES + FLAG_BYTES)  # rows to look up, and which are another rank's
    gradient = sizes.vocabulary * sizes.hidden_size * sizes.wide
    wide = 0 if sizes.wide == sizes.compute else tokens * sizes.hidden_size * sizes.wide
    put_off = hidden + tokens * TOKEN_BYTES
    return Activations(
        kept=kept,
        put_off=put_off,
        forward=kept + 2 * hidden + (hidden if sizes.shape.tp > 1 else 0),
        backward=kept + hidden + max(hidden, wide + gradient),
        input_gradient=kept + 2 * hidden,
        weight_gradient=put_off + wide + gradient,
    )


def head_activations(sizes: Sizes) -> Activations:
    """Of the last norm, the head and the loss, where the rank has the last stage."""
    tokens, hidden, c, s = sizes.tokens, sizes.whole_hidden, sizes.compute, sizes.wide
    logits, wide = (tokens * sizes.vocabulary * size for size in (c, s))
    weights = _with_sum(sizes, [sizes.vocabulary * sizes.hidden_size], c)
    norm = sizes.hidden + sizes.own_tokens * s
    # Of each token: Σ exp and its logarithm, the target's column, and whether it is here.
    loss = wide + tokens * (2 * s + TOKEN_BYTES + FLAG_BYTES)
    kept = norm + hidden + loss
    copy = 0 if s == c else wide
    put_off = logits + hidden
    return Activations(
        kept=kept,
        put_off=put_off,
        forward=norm + hidden + logits + copy + loss,
        backward=max(kept + wide + (logits if copy else 0), norm + 2 * hidden + logits + weights),
        input_gradient=max(kept + wide + (logits if copy else 0), norm + 2 * hidden + logits),
        weight_gradient=put_off + weights,
    )


class _Tape:
    """Tensors that come and go, and the most that there were at a time."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def hold(self, *sizes: int) -> None:
        self.live += sum(sizes)
        self.peak = max(self.peak, self.live)

    def drop(self, *sizes: int) -> None:
        self.live -= sum(sizes)

    def touch(self, *sizes: int) -> None:
        """Temporaries that are there together."""
        self.hold(*sizes)
        self.drop(*sizes)


class _Layer:
    """A layer's tensors on a tape.

    Args:
        recompute: what backward computes again.
        puts_off: whether weight gradients are left for W.
    """

    def __init__(self, sizes: Sizes, recompute: str, puts_off: bool = False) -> None:
        self.sizes, self.recompute, self.puts_off = sizes, recompute, puts_off
        self.tape = _Tape()
        tokens, own, s = sizes.tokens, sizes.own_tokens, sizes.wide
        self.norm = sizes.hidden + own * s
        """A norm between layers keeps its input, and 1/rms of each token."""
        self.attention_columns = self._columns_kept(3)
        self.mlp_columns = self._columns_kept(2)
        heads = len(sizes.heads.query)
        keys = sizes.queries if sizes.is_expanded else sizes.keys
        self.attended = sizes.of(2 * sizes.queries + 2 * keys) + tokens * heads * s
        self.gated = sizes.of(2 * sizes.ffn)
        # Without a norm, what attention made is kept by it already, and the product has the same.
        is_same = self._is_unchanged
        self.o_input = self._row_kept(sizes.queries, is_kept=True) - (
            sizes.product_input(sizes.queries) if is_same else 0
        )
        self.down_input = self._row_kept(sizes.ffn, is_kept=False)

    @property
    def kept(self) -> int:
        """What autograd keeps."""
        sizes = self.sizes
        if self.recompute == "full":
            output = sizes.hidden if sizes.adds_integers else 0
            return sizes.hidden + output + self._agreed("o") + self._agreed("down") + self._empty
        columns = 2 * self.norm + self.attention_columns + self.mlp_columns
        if self.recompute == "selective":
            return columns + self._attention_inputs + self.gated + self._results
        return columns + self.attended + self.o_input + self.gated + self.down_input

    @property
    def put_off(self) -> int:
        """Operands of weight gradients."""
        sizes = self.sizes
        grads = 2 * sizes.whole_hidden + sizes.of(sizes.queries + 2 * sizes.keys + 2 * sizes.ffn)
        if sizes.is_expanded:
            grads += sizes.of(sizes.keys)  # dK and dV are one tensor
        return grads + sum(
            sizes.product_input(columns) * count
            for columns, count in (
                (sizes.hidden_size, 5 if sizes.input_norms else 2),
                (sizes.queries, 1),
                (sizes.ffn, 1),
            )
        )

    def forward(self) -> None:
        """From x, which is held, to the layer's output, which is left."""
        sizes, tape = self.sizes, self.tape
        start = tape.live
        tape.hold(sizes.hidden)
        self._norm_forward(sizes.own_tokens * sizes.hidden_size)
        # Of attention's norm, the layer holds the output until its end.
        again = sizes.hidden if sizes.input_norms else 0  # it is kept, too
        tape.hold(self.attention_columns - again + self._attention_inputs)
        self._finish_attention()
        tape.hold(sizes.hidden)
        self._norm_forward(sizes.own_tokens * sizes.hidden_size)
        tape.hold(self.mlp_columns)
        tape.drop(sizes.hidden)
        tape.hold(self.gated)
        self._finish_mlp()
        tape.hold(sizes.hidden)
        tape.drop(tape.live - start - self.kept - sizes.hidden)

    def _finish_attention(self) -> None:
        """q, k and v are held, by the caller for as long as it runs."""
        sizes, tape = self.sizes, self.tape
        tape.touch(sizes.of(sizes.queries))  # a rotation has two products
        tape.hold(self.attended)
        if not sizes.is_expanded:
            tape.drop(sizes.of(sizes.keys))  # v is kept as it is
        self._row_forward(sizes.queries, self.o_input)
        if self.recompute == "selective":
            tape.drop(self.attended + self.o_input)

    def _finish_mlp(self) -> None:
        sizes, tape = self.sizes, self.tape
        product = sizes.of(sizes.ffn)
        tape.hold(product)
        self._row_forward(sizes.ffn, self.down_input - (product if sizes.has_sub_norm else 0))
        if not sizes.has_sub_norm:
            tape.drop(product)
        if self.recompute == "selective":
            tape.drop(self.down_input)

    def _row_forward(self, columns: int, kept: int) -> None:
        """A norm, a transform, and a row-parallel product; leaves what it keeps and its output."""
        sizes, tape = self.sizes, self.tape
        values = sizes.of(columns)
        if sizes.has_sub_norm:
            self._norm_forward(sizes.tokens * columns)  # leaves the values
        else:
            tape.hold(values if sizes.has_hadamard else 0)
        if sizes.has_hadamard:
            tape.touch(3 * sizes.tokens * columns * sizes.wide)
        tape.hold(kept)
        outputs = sizes.tokens * sizes.hidden_size
        tape.hold(sizes.whole_hidden)
        if sizes.shape.tp > 1:  # int32 sums, and their product with a scale
            tape.touch(outputs * (4 + sizes.wide))
        tape.drop(sizes.whole_hidden)
        if sizes.has_sub_norm or sizes.has_hadamard:
            tape.drop(values)

    def _norm_forward(self, elements: int) -> None:
        """Leaves the output; the input is held."""
        sizes, tape = self.sizes, self.tape
        c, s = sizes.compute, sizes.wide
        copy = 0 if s == c else elements * s
        tape.touch(copy + 2 * elements * s)  # its product with the gain, and squares
        tape.hold(elements * c)
        tape.touch(copy)

    def backward(self) -> None:
        """From what is kept and the output's gradient to the input's."""
        sizes, tape = self.sizes, self.tape
        tape.hold(self.kept, sizes.hidden)
        elements = sizes.own_tokens * sizes.hidden_size
        if self.recompute == "full":
            again = _Layer(sizes, "none")
            again.forward()
            tape.touch(again.tape.peak - sizes.hidden)
            tape.hold(again.kept - sizes.hidden)
        if self.recompute == "selective":
            tape.touch(self.down_input + sizes.of(2 * sizes.ffn))
            tape.hold(self.down_input)
        self._row_backward(sizes.ffn, self.down_input)
        self._gate_backward()
        self._columns_backward((sizes.ffn, sizes.ffn), self.mlp_columns)
        self._norm_backward(elements, self.norm)
        tape.touch(sizes.hidden)  # the sum with what passes by
        tape.drop(sizes.hidden)
        if self.recompute == "selective":
            tape.touch(self.attended + self.o_input + sizes.of(2 * sizes.queries))
            tape.hold(self.attended + self.o_input - sizes.of(sizes.keys))
        self._row_backward(sizes.queries, self.o_input)
        self._attention_backward()
        outputs = (sizes.queries, sizes.keys, sizes.keys)
        self._columns_backward(outputs, self.attention_columns)
        self._norm_backward(elements, self.norm)

    def _row_backward(self, columns: int, kept: int) -> None:
        """The gradient of the layer's output is held, and stays; leaves that of what came in."""
        sizes, tape = self.sizes, self.tape
        gathered = sizes.whole_hidden if sizes.own_tokens < sizes.tokens else 0
        tape.hold(gathered)
        self._input_gradient(columns, (sizes.hidden_size,))
        self._weight_gradients(columns, (sizes.hidden_size,))
        operands = sizes.product_input(columns)
        if self.puts_off:
            tape.hold(0 if gathered else sizes.whole_hidden)
        else:
            tape.drop(gathered)
        norm = sizes.has_sub_norm
        # What the product has is freed here, unless W wants it.
        freed = 0 if self.puts_off else operands
        tape.drop(min(freed, kept))
        if sizes.has_hadamard:
            tape.touch(3 * sizes.tokens * columns * sizes.wide)
        if norm:
            self._norm_backward(sizes.tokens * columns, max(0, kept - operands))

    def _gate_backward(self) -> None:
        sizes, tape = self.sizes, self.tape
        product = sizes.of(sizes.ffn)
        tape.touch((3 if sizes.shape.config.model.hidden_act == "relu2" else 4) * product)
        tape.hold(product)  # two gradients in place of one
        tape.drop(self.gated)

    def _attention_backward(self) -> None:
        sizes, tape = self.sizes, self.tape
        queries, keys = sizes.of(sizes.queries), sizes.of(sizes.keys)
        own_keys = queries if sizes.is_expanded else keys
        tape.hold(queries + 2 * own_keys)
        tape.drop(self.attended, queries)
        if sizes.is_expanded:
            tape.touch(4 * keys)
            tape.hold(2 * keys)
            tape.drop(2 * queries)
        tape.touch(2 * queries)  # to rotate

    def _columns_backward(self, outputs: tuple[int, ...], kept: int) -> None:
        """The outputs' gradients are held; leaves that of the input ``[t, H]``."""
        sizes, tape = self.sizes, self.tape
        if sizes.input_norms:  # then each layer's gradient goes through a norm of its own
            for rows in outputs:
                self._input_gradient(sizes.hidden_size, (rows,))
                self._weight_gradients(sizes.hidden_size, (rows,))
                tape.drop(sizes.whole_hidden)
            tape.hold(sizes.whole_hidden)
        else:
            self._input_gradient(sizes.hidden_size, outputs)
            self._weight_gradients(sizes.hidden_size, outputs)
        if not self.puts_off:
            tape.drop(kept, sizes.of(sum(outputs)))
        if sizes.own_tokens < sizes.tokens:
            tape.hold(sizes.hidden)
            tape.drop(sizes.whole_hidden)

    def _input_gradient(self, inputs: int, outputs: tuple[int, ...]) -> None:
        """dX of layers with one input of so many columns; leaves it."""
        sizes, tape = self.sizes, self.tape
        result = sizes.of(inputs)
        if not sizes.adds_integers:
            values = inputs * max(outputs) * sizes.compute if sizes.shape.is_ternary else 0
            tape.touch(values + min(len(outputs), 3) * result)
            tape.hold(result)
            return
        b, s = sizes.operand, sizes.wide
        product, wide = (sizes.tokens * inputs * size for size in (b, s))
        earlier = 0
        for rows in outputs:
            grad = sizes.tokens * rows * b if b != sizes.compute else 0
            if sizes.is_gpu:
                tape.touch(earlier + wide)
            elif b == 1:
                copy = 0 if sizes.compute == s else sizes.tokens * rows * s
                tape.touch(earlier + grad + max(copy, inputs * rows + wide))
            else:
                codes = inputs * rows * b
                tape.touch(earlier + codes + grad + product)
                tape.touch(earlier + codes + product + (wide if b != s else 0))
            earlier = wide
        if sizes.compute != s:
            tape.touch(wide + result)
        tape.hold(result)

    def _weight_gradients(self, inputs: int, outputs: tuple[int, ...]) -> None:
        """dW of layers with one input, unless they are put off; leaves nothing."""
        sizes = self.sizes
        if self.puts_off:
            return
        is_made = sizes.shape.is_ternary and not sizes.adds_integers and not sizes.is_ramp
        values = max(outputs) * inputs * sizes.compute if is_made else 0  # γ · codes, as for dX
        self.tape.touch(values + _weight_gradients_peak(sizes, inputs, outputs))

    def _norm_backward(self, elements: int, kept: int) -> None:
        """The output's gradient is held; leaves the input's."""
        sizes, tape = self.sizes, self.tape
        c, s = sizes.compute, sizes.wide
        copy = 0 if s == c else elements * s
        tape.touch(copy + 3 * elements * s)  # normalized, its gradient, and their product
        tape.touch(2 * elements * s + (elements * c if copy else 0))
        tape.drop(kept)

    @property
    def _is_unchanged(self) -> bool:
        """Whether a row-parallel product reads what it is given, and not something made of it."""
        sizes = self.sizes
        is_read = not sizes.quantizes
        return is_read and not sizes.has_sub_norm and not sizes.has_hadamard

    @property
    def _attention_inputs(self) -> int:
        """q, k and v as the products give them."""
        return self.sizes.of(self.sizes.queries + 2 * self.sizes.keys)

    @property
    def _empty(self) -> int:
        """Of a product that is recomputed nothing but the shape is kept: one number of it."""
        return self.sizes.compute if self.sizes.adds_integers else 0

    @property
    def _results(self) -> int:
        """What selective recomputation takes over from the first pass."""
        return self._agreed("o") + self._agreed("down") + 2 * self._empty

    def _agreed(self, place: str) -> int:
        """Statistics that ranks share, of a row-parallel layer's input."""
        sizes = self.sizes
        model = sizes.shape.config.model
        if sizes.shape.tp == 1:
            return 0
        numbers = 0
        if sizes.has_sub_norm:  # Σx² and max|x·g| of each block
            numbers += 2 * model.num_attention_heads * sizes.wide
        if sizes.quantizes and (sizes.has_hadamard or not sizes.has_sub_norm):
            numbers += sizes.wide
        if sizes.quantizes and model.activations == "a4.8" and place == "o":
            numbers += 2  # int16
        return sizes.tokens * numbers

    def _columns_kept(self, layers: int) -> int:
        """Of layers with one input."""
        sizes = self.sizes
        product = sizes.product_input(sizes.hidden_size)
        if not sizes.input_norms:
            return product
        return sizes.hidden + layers * (product + sizes.own_tokens * sizes.wide)

    def _row_kept(self, columns: int, is_kept: bool) -> int:
        """Of a row-parallel layer and the norm before it.

        Args:
            is_kept: whether the norm's input is kept by what made it, too.
        """
        sizes = self.sizes
        norm = 0
        if sizes.has_sub_norm:
            norm = sizes.tokens * sizes.wide + (0 if is_kept else sizes.of(columns))
        return norm + sizes.product_input(columns)


def _backward_peak(sizes: Sizes, recompute: str, puts_off: bool) -> int:
    layer = _Layer(sizes, recompute, puts_off)
    layer.backward()
    return layer.tape.peak


def _weight_gradients_peak(sizes: Sizes, inputs: int, outputs: tuple[int, ...]) -> int:
    """The most beside the operands while dW of layers with one input is computed."""
    weights = [rows * inputs for rows in outputs]
    if not sizes.adds_integers:  # one after the other
        return max(_with_sum(sizes, [weight], sizes.compute) for weight in weights)
    b, tokens = sizes.operand, sizes.tokens
    element = sizes.wide if b == 1 else b
    summed = _with_sum(sizes, weights, element)
    if sizes.is_gpu:
        return summed
    is_converted = b > 1 or sizes.compute != sizes.wide
    shared = tokens * inputs * b
    peak = earlier = 0
    for rows in outputs:
        scaled = tokens * rows * (b + (sizes.wide if is_converted and b != sizes.wide else 0))
        own = rows * inputs * element
        peak = max(peak, earlier + scaled, earlier + tokens * rows * b + own)
        earlier += own
    return max(shared + peak, tokens * inputs + summed)


def _with_sum(sizes: Sizes, elements: Sequence[int], element: int) -> int:
    """Gradients of weights, and what a CPU makes of the first to add it to wider sums."""
    is_converted = element != sizes.wide and not sizes.is_gpu
    return sum(elements) * element + (elements[0] * sizes.wide if is_converted else 0)


def _weights_peak(sizes: Sizes) -> int:
    layer = _Layer(sizes, "none")
    ffn, hidden = sizes.ffn, sizes.hidden_size
    return layer.put_off + max(
        _weight_gradients_peak(sizes, inputs, outputs)
        for inputs, outputs in (
            (ffn, (hidden,)),
            (hidden, (ffn, ffn)),
            (hidden, (sizes.queries, sizes.keys, sizes.keys)),
        )
    )
