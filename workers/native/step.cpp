// A whole forward pass of a dense decoder in one call.
//
// Every thread walks through the same stages and meets the others at a barrier after each. Stages of rows and of
// linears are shared out evenly, attention units are taken one by one. From the last layer's attention on, only the
// asked rows go on: nobody reads the others.
#include <string.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "model.h"

using namespace baton;

void baton::reserve_buffers(BatonModel &m, const Request &r) {
    const int64_t t = r.tables->num_tokens, rows = std::max(t, r.num_rows);
    int64_t qkv = 0, heads = 0, gate_up = 0, head_dim = 0;
    for (const BatonLayer &layer : m.layers) {
        qkv = std::max(qkv, layer.qkv->view.n);
        heads = std::max(heads, layer.out->view.k);
        gate_up = std::max(gate_up, layer.gate_up->view.n);
        head_dim = std::max(head_dim, layer.attention.head_dim);
    }
    m.x.reserve(t * m.width * 4);
    m.kept.reserve(rows * m.width * 4);
    m.delta.reserve(rows * m.width * 4);
    m.normed.reserve(rows * m.widest_input * 4);
    m.qkv.reserve(t * qkv * 4);
    m.attended.reserve(t * heads * 4);
    m.gate_up.reserve(rows * gate_up * 4);
    m.rounded.reserve(rows, round_up(m.widest_input, GROUP));
    m.engine->reserve_scratch(std::max(linear_scratch_bytes(m.widest_input),
                                       attention_scratch_bytes(longest_context(*r.tables), head_dim)));
}

BatonCache baton::cache_of(const BatonCache &all, const BatonAttention &a, int64_t layer) {
    const int64_t element = all.is_bf16 ? 2 : 4;
    const int64_t bytes = all.num_blocks * 2 * a.num_kv_heads * all.block_tokens * a.head_dim * element;
    BatonCache cache = all;
    cache.data = static_cast<uint8_t *>(all.data) + layer * bytes;
    return cache;
}

namespace {

// What the threads of one step share.
class Step {
public:
    Step(BatonModel &model, const Request &request);
    void walk(int thread);
    bool is_stopped() const { return is_stopped_.load(); }

private:
    bool walk_layer(int thread, const BatonLayer &layer, int64_t index);
    void walk_mlp(int thread, const BatonLayer &layer);
    void walk_head(int thread);

    void embed(int thread);
    void enter(int thread, const float *norm, const float *after_norm, bool has_delta, const BatonMatrix *next);
    void linear(int thread, const BatonMatrix *weight, const float *bias, const float *in, float *out);
    void rotate(int thread, const BatonLayer &layer, const BatonCache &cache);
    void attend(int thread, const BatonLayer &layer, const BatonCache &cache, int64_t index);
    void leave_attention(int thread, const BatonLayer &layer, bool is_last);
    void activate(int thread, const BatonLayer &layer);

    void end_stage(int thread, Stage stage);
    Range own_rows(int thread) const { return share_of(live_rows_, thread, model_.engine->pool.size()); }

    BatonModel &model_;
    const Request &request_;
    const Kernels &kernels_;
    std::vector<AttentionUnit> units_, last_units_;
    std::vector<std::atomic<int64_t>> next_unit_;       // one per layer
    std::atomic<bool> is_stopped_{false};
    int64_t live_rows_;                                 // changed by thread 0 between barriers
    float *x_;
    int64_t stage_began_ = 0;
};

Step::Step(BatonModel &model, const Request &request)
    : model_(model), request_(request), kernels_(model.engine->kernels),
      units_(plan_units(*request.tables, model.layers[0].attention)), next_unit_(model.layers.size()),
      live_rows_(request.tables->num_tokens) {
    reserve_buffers(model, request);
    x_ = model.x.as<float>();
    for (std::atomic<int64_t> &next : next_unit_) next.store(0);
    for (int64_t i = 0; i < request.num_rows; i++)
        for (int64_t head = 0; head < model.layers.back().attention.num_kv_heads; head++)
            last_units_.push_back(plan_unit(*request.tables, request.rows[i], head));
}

void Step::end_stage(int thread, Stage stage) {
    model_.engine->pool.barrier();
    if (thread) return;
    const int64_t now = now_ns();
    model_.stage_ns[stage] += now - stage_began_;
    stage_began_ = now;
}

void Step::walk(int thread) {
    if (!thread) stage_began_ = now_ns();
    embed(thread);
    for (size_t i = 0; i < model_.layers.size(); i++)
        if (!walk_layer(thread, model_.layers[i], (int64_t)i)) return;
    if (request_.num_rows) walk_head(thread);
}

// False when the step is over: stopped by the listener, or no row is asked for.
bool Step::walk_layer(int thread, const BatonLayer &layer, int64_t index) {
    const bool is_last = index + 1 == (int64_t)model_.layers.size();
    const BatonCache cache = cache_of(*request_.cache, layer.attention, index);
    const float *after = index ? model_.layers[index - 1].after_mlp_norm : nullptr;
    enter(thread, layer.attention_norm, after, index > 0, layer.qkv);
    linear(thread, layer.qkv, layer.qkv_bias, model_.normed.as<float>(), model_.qkv.as<float>());
    rotate(thread, layer, cache);
    if (!thread && request_.on_layer && request_.on_layer(index)) is_stopped_.store(true);
    if (is_last && !request_.num_rows) return false;
    attend(thread, layer, cache, index);
    if (is_stopped_.load()) return false;
    leave_attention(thread, layer, is_last);
    walk_mlp(thread, layer);
    return true;
}

void Step::walk_mlp(int thread, const BatonLayer &layer) {
    enter(thread, layer.mlp_norm, layer.after_attention_norm, true, layer.gate_up);
    linear(thread, layer.gate_up, layer.gate_up_bias, model_.normed.as<float>(), model_.gate_up.as<float>());
    activate(thread, layer);
    linear(thread, layer.down, layer.down_bias, model_.normed.as<float>(), model_.delta.as<float>());
}

void Step::walk_head(int thread) {
    const BatonMatrix *head = model_.decoder.head;
    enter(thread, model_.decoder.norm, model_.layers.back().after_mlp_norm, true, head);
    const LinearJob job = {&head->view, model_.rounded.view(model_.normed.as<float>(), head->view.k), nullptr,
                           request_.logits};
    model_.engine->linear(thread, job, live_rows_);
    end_stage(thread, HEAD);
    if (model_.decoder.softcap <= 0.0f) return;
    const Range own = own_rows(thread);
    for (int64_t row = own.low; row < own.high; row++)
        kernels_.softcap_row(request_.logits + row * head->view.n, model_.decoder.softcap, head->view.n);
}

void Step::embed(int thread) {
    const Range own = own_rows(thread);
    for (int64_t row = own.low; row < own.high; row++) {
        kernels_.unpack_row(model_.decoder.embedding->view, request_.ids[row], x_ + row * model_.width);
        if (model_.decoder.embedding_scale != 1.0f)
            kernels_.scale_row(x_ + row * model_.width, model_.decoder.embedding_scale, model_.width);
    }
}

// x += delta where a linear left one; normed = norm(x), rounded where `next` wants it.
void Step::enter(int thread, const float *norm, const float *after_norm, bool has_delta, const BatonMatrix *next) {
    const int64_t width = model_.width;
    const float eps = model_.decoder.norm_eps;
    const Range own = own_rows(thread);
    const Activations in = model_.rounded.view(nullptr, width);
    for (int64_t row = own.low; row < own.high; row++) {
        float *x = x_ + row * width, *delta = model_.delta.as<float>() + row * width;
        float *normed = model_.normed.as<float>() + row * width;
        if (after_norm) kernels_.norm_row(delta, after_norm, eps, width, delta);
        if (has_delta) kernels_.add_row(x, delta, width);
        kernels_.norm_row(x, norm, eps, width, normed);
        if (next->view.is_grouped()) kernels_.round_row(in, row, {0, num_groups(width)}, normed);
    }
    end_stage(thread, ROWS);
}

void Step::linear(int thread, const BatonMatrix *weight, const float *bias, const float *in, float *out) {
    const LinearJob job = {&weight->view, model_.rounded.view(in, weight->view.k), bias, out};
    model_.engine->linear(thread, job, live_rows_);
    end_stage(thread, LINEARS);
}

void Step::rotate(int thread, const BatonLayer &layer, const BatonCache &cache) {
    const Range own = own_rows(thread);
    for (int64_t row = own.low; row < own.high; row++)
        model_.engine->rotate_and_store(layer.attention, *request_.tables, cache, row,
                                        model_.qkv.as<float>() + row * layer.qkv->view.n);
    end_stage(thread, ROWS);
}

void Step::attend(int thread, const BatonLayer &layer, const BatonCache &cache, int64_t index) {
    const bool is_last = index + 1 == (int64_t)model_.layers.size();
    const AttentionJob job = {&layer.attention, request_.tables, cache, model_.qkv.as<float>(), layer.qkv->view.n,
                              model_.attended.as<float>()};
    model_.engine->attend(thread, job, is_last ? last_units_ : units_, next_unit_[index]);
    end_stage(thread, ATTENTION);
}

// Rounds the attended rows and multiplies them by the output matrix; in the last layer the asked rows alone.
void Step::leave_attention(int thread, const BatonLayer &layer, bool is_last) {
    const int64_t k = layer.out->view.k, width = model_.width;
    const float *attended = model_.attended.as<float>();
    if (is_last) {
        if (!thread) {
            live_rows_ = request_.num_rows;
            x_ = model_.kept.as<float>();
        }
        model_.engine->pool.barrier();
    }
    const Range own = own_rows(thread);
    const Activations in = model_.rounded.view(nullptr, k);
    for (int64_t row = own.low; row < own.high; row++) {
        const int64_t from = is_last ? request_.rows[row] : row;
        if (layer.out->view.is_grouped()) kernels_.round_row(in, row, {0, num_groups(k)}, attended + from * k);
        if (!is_last) continue;
        memcpy(x_ + row * width, model_.x.as<float>() + from * width, (size_t)width * 4);
        memcpy(model_.normed.as<float>() + row * k, attended + from * k, (size_t)k * 4);
    }
    end_stage(thread, ROWS);
    linear(thread, layer.out, layer.out_bias, is_last ? model_.normed.as<float>() : attended, model_.delta.as<float>());
}

void Step::activate(int thread, const BatonLayer &layer) {
    const int64_t inner = layer.down->view.k;
    const Range own = own_rows(thread);
    const Activations in = model_.rounded.view(nullptr, inner);
    for (int64_t row = own.low; row < own.high; row++) {
        float *out = model_.normed.as<float>() + row * inner;
        const float *gate = model_.gate_up.as<float>() + row * 2 * inner;
        kernels_.activate_row(layer.activation, gate, gate + inner, inner, out);
        if (layer.down->view.is_grouped()) kernels_.round_row(in, row, {0, num_groups(inner)}, out);
    }
    end_stage(thread, ROWS);
}

bool is_sound(const BatonModel &model, const int64_t *ids, const Request &r) {
    const auto is_below = [](int64_t i, int64_t limit) { return i >= 0 && i < limit; };
    for (const BatonLayer &layer : model.layers)  // a layer differs from the first in rope at most
        if ((&layer == &model.layers[0] || layer.attention.rope_positions != model.layers[0].attention.rope_positions) &&
            !are_sound(*r.tables, layer.attention, *r.cache))
            return false;
    for (int64_t i = 0; i < r.tables->num_tokens; i++)
        if (!is_below(ids[i], model.decoder.embedding->view.n)) return false;
    for (int64_t i = 0; i < r.num_rows; i++)
        if (!is_below(r.rows[i], r.tables->num_tokens)) return false;
    return true;
}

}  // namespace

BatonModel *baton_make_model(BatonEngine *engine, const BatonDecoder *decoder) {
    try {
        auto model = std::make_unique<BatonModel>();
        model->engine = engine;
        model->decoder = *decoder;
        model->layers.assign(decoder->layers, decoder->layers + decoder->num_layers);
        model->width = model->widest_input = decoder->embedding->view.k;
        for (const BatonLayer &layer : model->layers)
            model->widest_input = std::max({model->widest_input, layer.out->view.k, layer.down->view.k});
        return model.release();
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}

void baton_free_model(BatonModel *model) { delete model; }

int32_t baton_step(BatonModel *model, const int64_t *ids, const int64_t *rows, int64_t num_rows,
                   const BatonTables *tables, const BatonCache *cache, BatonOnLayer on_layer, float *logits) {
    try {
        const Request request = {ids, rows, num_rows, tables, cache, on_layer, logits};
        if (!is_sound(*model, ids, request)) return BATON_BAD_ARGUMENT;
        if (are_few(*model, request)) return step_few(*model, request) ? BATON_OK : BATON_STOPPED;
        Step step(*model, request);
        model->engine->pool.run([&](int thread) { step.walk(thread); });
        return step.is_stopped() ? BATON_STOPPED : BATON_OK;
    } catch (const std::bad_alloc &) {
        return BATON_NO_MEMORY;
    }
}

void baton_stage_ns(BatonModel *model, int64_t out[4]) {
    for (int i = 0; i < 4; i++) out[i] = std::exchange(model->stage_ns[i], 0);
}
