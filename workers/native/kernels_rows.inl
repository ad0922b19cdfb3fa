// Work on one row at a time, over the vectors F and I of the level that includes this.

// x in vectors of 16, the last one partly: body(at, lanes) for each.
template <class Body>
INLINE void each_vector(int64_t width, Body body) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) body(i, LANES);
    if (i < width) body(i, (int)(width - i));
}
INLINE F load_some(const float *p, int n) { return n == LANES ? load(p) : load_part(p, n); }
INLINE void store_some(float *p, F v, int n) {
    if (n == LANES) store(p, v);
    else store_part(p, v, n);
}

// e^x, 0 below -87; within 2 units in the last place. Cephes' polynomial on x - n ln 2.
INLINE F exp_of(F x) {
    const F bounded = min_of(splat(88.0f), max_of(splat(-87.0f), x));  // NaN passes both
    const I n = to_int(mul(bounded, splat(1.44269504088896341f)));
    const F whole = to_float(n);
    F r = fma(whole, splat(-0.693359375f), bounded);
    r = fma(whole, splat(2.12194440e-4f), r);
    F p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(mul(p, r), r, add(r, splat(1.0f)));
    return select_less(x, splat(-87.0f), splat(0.0f), mul(p, power_of_two(n)));
}

// tanh(x) = 1 - 2 / (e^2x + 1)
INLINE F tanh_of(F x) {
    const F e = exp_of(add(x, x));
    return sub(splat(1.0f), div(splat(2.0f), add(e, splat(1.0f))));
}
INLINE F sigmoid_of(F x) { return div(splat(1.0f), add(splat(1.0f), exp_of(sub(splat(0.0f), x)))); }

void add_row(float *x, const float *delta, int64_t width) {
    each_vector(width, [&](int64_t i, int n) { store_some(x + i, add(load_some(x + i, n), load_some(delta + i, n)), n); });
}

void scale_row(float *x, float factor, int64_t width) {
    each_vector(width, [&](int64_t i, int n) { store_some(x + i, mul(load_some(x + i, n), splat(factor)), n); });
}

void softcap_row(float *x, float cap, int64_t width) {
    each_vector(width, [&](int64_t i, int n) {
        store_some(x + i, mul(splat(cap), tanh_of(div(load_some(x + i, n), splat(cap)))), n);
    });
}

void norm_row(const float *x, const float *weight, float eps, int64_t width, float *out) {
    F squares = splat(0.0f);
    each_vector(width, [&](int64_t i, int n) {
        const F v = load_some(x + i, n);
        squares = fma(v, v, squares);
    });
    const F factor = splat(1.0f / __builtin_sqrtf(sum(squares) / (float)width + eps));
    each_vector(width, [&](int64_t i, int n) {
        store_some(out + i, mul(mul(load_some(x + i, n), factor), load_some(weight + i, n)), n);
    });
}

INLINE F gated(int64_t activation, F gate, F up) {
    if (activation == BATON_SILU) return mul(up, mul(gate, sigmoid_of(gate)));
    if (activation == BATON_GELU_TANH) {
        const F cube = mul(gate, mul(gate, gate));
        const F inner = mul(splat(0.7978845608028654f), fma(splat(0.044715f), cube, gate));
        return mul(up, mul(mul(splat(0.5f), gate), add(splat(1.0f), tanh_of(inner))));
    }
    gate = min_of(splat(7.0f), gate);
    up = min_of(splat(7.0f), max_of(splat(-7.0f), up));
    return mul(mul(add(up, splat(1.0f)), gate), sigmoid_of(mul(splat(1.702f), gate)));
}

void activate_row(int64_t activation, const float *gate, const float *up, int64_t width, float *out) {
    each_vector(width, [&](int64_t i, int n) {
        store_some(out + i, gated(activation, load_some(gate + i, n), load_some(up + i, n)), n);
    });
}

// Channels i and i + pairs turn together.
void rotate_row(const float *cos, const float *sin, int64_t pairs, float *head) {
    each_vector(pairs, [&](int64_t i, int n) {
        const F c = load_some(cos + i, n), s = load_some(sin + i, n);
        const F a = load_some(head + i, n), b = load_some(head + pairs + i, n);
        store_some(head + i, sub(mul(a, c), mul(b, s)), n);
        store_some(head + pairs + i, add(mul(b, c), mul(a, s)), n);
    });
}

INLINE uint16_t bf16_of(float x) {
    uint16_t lanes[LANES];
    store(lanes, splat(x));
    return lanes[0];
}

void store_row(const float *head, int64_t width, bool is_bf16, void *out) {
    if (!is_bf16) {
        memcpy(out, head, 4 * (size_t)width);
        return;
    }
    uint16_t *halves = (uint16_t *)out;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store(halves + i, load(head + i));
    for (; i < width; i++) halves[i] = bf16_of(head[i]);
}

// The same, elements `stride` apart.
void store_column(const float *head, int64_t width, bool is_bf16, void *out, int64_t stride) {
    if (!is_bf16) {
        for (int64_t i = 0; i < width; i++) ((float *)out)[i * stride] = head[i];
        return;
    }
    uint16_t halves[LANES];
    each_vector(width, [&](int64_t i, int n) {
        store(halves, load_some(head + i, n));
        for (int lane = 0; lane < n; lane++) ((uint16_t *)out)[(i + lane) * stride] = halves[lane];
    });
}

// Groups of 32 of row `row` of `in` become those of x, a whole row: scale = m / 127, q = round(x * (127 / m)).
// A group whose m is below 1e-30 counts as zeros. The largest magnitude is found on bits, so that a NaN wins and reaches the logits.
void round_row(const Activations &in, int64_t row, Range own, const float *x) {
    const int64_t groups = num_groups(in.k);
    int8_t *q = in.q + row * in.k + own.low * GROUP;
    x += own.low * GROUP;
    for (int64_t g = own.low; g < own.high; g++, x += GROUP, q += GROUP) {
        const F a = load(x), b = load(x + LANES);
        const int32_t bits = largest_int(max_int(magnitude_bits(a), magnitude_bits(b)));
        float most;
        memcpy(&most, &bits, 4);
        const float scale = most / 127.0f;
        const F inverse = splat(most < 1e-30f ? 0.0f : 127.0f / most);
        const I low = to_int(mul(a, inverse)), high = to_int(mul(b, inverse));
        store_int8(q, low);
        store_int8(q + LANES, high);
        const int32_t total = sum_int(add_int(low, high));
        in.scale[row * groups + g] = scale;
        in.scaled_sum[row * groups + g] = scale * (float)total;
        in.offset[row * groups + g] = -128 * total;
    }
}
