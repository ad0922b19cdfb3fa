// A whole forward pass of a few rows on several threads.
//
// Every thread adds, norms and rounds all rows for itself, turns and stores the heads that it attends with, and activates
// the columns that it has computed: so threads meet five times a layer, and share nothing between that they would have to
// wait for. Each row's arithmetic is that of step.cpp, to the last bit.
#include <string.h>

#include <algorithm>

#include "model.h"

namespace baton {
namespace {

constexpr int64_t FEW_ROWS = 4;

class FewRows {
public:
    FewRows(BatonModel &model, const Request &request);
    void walk(int thread);
    bool is_stopped() const { return is_stopped_; }

private:
    void embed(Lane &own);
    void enter(Lane &own, const float *norm, const float *after_norm, bool has_delta, const BatonMatrix *next);
    void linear(int thread, const Activations &in, const BatonMatrix *weight, const float *bias, float *out);
    void attend(int thread, const BatonLayer &layer, int64_t index);
    void leave_attention(int thread, Lane &own, const BatonLayer &layer, bool is_last);
    void walk_mlp(int thread, Lane &own, const BatonLayer &layer);
    void end_stage(int thread, Stage stage);

    BatonModel &model_;
    const Request &request_;
    const Kernels &kernels_;
    std::vector<AttentionUnit> units_;
    std::vector<std::atomic<int64_t>> next_unit_;   // one per layer
    bool is_stopped_ = false;                       // written by thread 0 between two barriers, read after the second
    int64_t stage_began_ = 0;
};

FewRows::FewRows(BatonModel &model, const Request &request)
    : model_(model), request_(request), kernels_(model.engine->kernels),
      units_(plan_units(*request.tables, model.layers[0].attention)), next_unit_(model.layers.size()) {
    reserve_buffers(model, request);
    const int64_t rows = std::max(request.tables->num_tokens, request.num_rows);
    int64_t widest = model.width;
    for (const BatonLayer &layer : model.layers) widest = std::max(widest, layer.out->view.k);
    model.lanes.resize((size_t)model.engine->pool.size());
    for (Lane &lane : model.lanes) {
        lane.x.reserve(rows * model.width * 4);
        lane.kept.reserve(rows * model.width * 4);
        lane.normed.reserve(rows * widest * 4);
        lane.rounded.reserve(rows, round_up(widest, GROUP));
    }
    for (std::atomic<int64_t> &next : next_unit_) next.store(0);
}

void FewRows::end_stage(int thread, Stage stage) {
    model_.engine->pool.barrier();
    if (thread) return;
    const int64_t now = now_ns();
    model_.stage_ns[stage] += now - stage_began_;
    stage_began_ = now;
}

void FewRows::walk(int thread) {
    if (!thread) stage_began_ = now_ns();
    Lane &own = model_.lanes[(size_t)thread];
    embed(own);
    for (size_t i = 0; i < model_.layers.size(); i++) {
        const BatonLayer &layer = model_.layers[i];
        const bool is_last = i + 1 == model_.layers.size();
        enter(own, layer.attention_norm, i ? model_.layers[i - 1].after_mlp_norm : nullptr, i > 0, layer.qkv);
        linear(thread, own.rounded.view(own.normed.as<float>(), layer.qkv->view.k), layer.qkv, layer.qkv_bias,
               model_.qkv.as<float>());
        end_stage(thread, LINEARS);
        attend(thread, layer, (int64_t)i);
        if (!thread && request_.on_layer && request_.on_layer((int64_t)i)) is_stopped_ = true;
        if (is_last && !request_.num_rows) return;
        leave_attention(thread, own, layer, is_last);
        if (is_stopped_) return;
        walk_mlp(thread, own, layer);
    }
    const BatonMatrix *head = model_.decoder.head;
    enter(own, model_.decoder.norm, model_.layers.back().after_mlp_norm, true, head);
    linear(thread, own.rounded.view(own.normed.as<float>(), head->view.k), head, nullptr, request_.logits);
    end_stage(thread, HEAD);
    if (thread || model_.decoder.softcap <= 0.0f) return;
    for (int64_t row = 0; row < request_.num_rows; row++)
        kernels_.softcap_row(request_.logits + row * head->view.n, model_.decoder.softcap, head->view.n);
}

void FewRows::embed(Lane &own) {
    own.live = own.x.as<float>();
    own.num_live = request_.tables->num_tokens;
    for (int64_t row = 0; row < own.num_live; row++) {
        float *x = own.live + row * model_.width;
        kernels_.unpack_row(model_.decoder.embedding->view, request_.ids[row], x);
        if (model_.decoder.embedding_scale != 1.0f) kernels_.scale_row(x, model_.decoder.embedding_scale, model_.width);
    }
}

// x += delta where a linear left one; normed = norm(x), rounded where `next` wants it.
void FewRows::enter(Lane &own, const float *norm, const float *after_norm, bool has_delta, const BatonMatrix *next) {
    const int64_t width = model_.width;
    const float eps = model_.decoder.norm_eps;
    const Activations in = own.rounded.view(nullptr, width);
    for (int64_t row = 0; row < own.num_live; row++) {
        float *x = own.live + row * width, *normed = own.normed.as<float>() + row * width;
        const float *delta = model_.delta.as<float>() + row * width;
        if (after_norm) {
            kernels_.norm_row(delta, after_norm, eps, width, normed);
            delta = normed;
        }
        if (has_delta) kernels_.add_row(x, delta, width);
        kernels_.norm_row(x, norm, eps, width, normed);
        if (next->view.is_grouped()) kernels_.round_row(in, row, {0, num_groups(width)}, normed);
    }
}

void FewRows::linear(int thread, const Activations &in, const BatonMatrix *weight, const float *bias, float *out) {
    const LinearJob job = {&weight->view, in, bias, out};
    model_.engine->linear(thread, job, model_.lanes[(size_t)thread].num_live);
}

// A unit is all tokens of a request at one KV head: nobody else reads or writes what it turns and stores.
void FewRows::attend(int thread, const BatonLayer &layer, int64_t index) {
    const BatonAttention &a = layer.attention;
    const BatonTables &tables = *request_.tables;
    const BatonCache cache = cache_of(*request_.cache, a, index);
    const int64_t width = layer.qkv->view.n, count = (int64_t)units_.size();
    float *qkv = model_.qkv.as<float>(), *scratch = model_.engine->scratch[(size_t)thread].as<float>();
    const AttentionJob job = {&a, &tables, cache, qkv, width, model_.attended.as<float>()};
    for (int64_t i = next_unit_[(size_t)index].fetch_add(1); i < count; i = next_unit_[(size_t)index].fetch_add(1)) {
        const AttentionUnit &unit = units_[(size_t)i];
        const int64_t first = tables.spans[unit.span].first_row + unit.first_token;
        for (int64_t row = first; row < first + unit.num_tokens; row++)
            model_.engine->rotate_group(a, tables, cache, row, unit.kv_head, qkv + row * width);
        kernels_.attend(job, unit, scratch);
    }
    end_stage(thread, ATTENTION);
}

// Rounds the attended rows and multiplies them by the output matrix; in the last layer the asked rows alone.
void FewRows::leave_attention(int thread, Lane &own, const BatonLayer &layer, bool is_last) {
    const int64_t k = layer.out->view.k, width = model_.width;
    const float *attended = model_.attended.as<float>();
    const Activations in = own.rounded.view(is_last ? own.normed.as<float>() : attended, k);
    const int64_t rows = is_last ? request_.num_rows : own.num_live;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t from = is_last ? request_.rows[row] : row;
        if (layer.out->view.is_grouped()) kernels_.round_row(in, row, {0, num_groups(k)}, attended + from * k);
        if (!is_last) continue;
        memcpy(own.kept.as<float>() + row * width, own.x.as<float>() + from * width, (size_t)width * 4);
        memcpy(own.normed.as<float>() + row * k, attended + from * k, (size_t)k * 4);
    }
    if (is_last) {
        own.live = own.kept.as<float>();
        own.num_live = rows;
    }
    linear(thread, in, layer.out, layer.out_bias, model_.delta.as<float>());
    end_stage(thread, LINEARS);
}

// Each thread activates the columns whose gate and up it has computed, in whole groups.
void FewRows::walk_mlp(int thread, Lane &own, const BatonLayer &layer) {
    enter(own, layer.mlp_norm, layer.after_attention_norm, true, layer.gate_up);
    const int64_t inner = layer.down->view.k, blocks_per_group = GROUP / LANES;
    const Range groups = share_of(inner / GROUP, thread, model_.engine->pool.size());
    const Range gate = {groups.low * blocks_per_group, groups.high * blocks_per_group};
    const Range up = {gate.low + inner / LANES, gate.high + inner / LANES};
    const LinearJob job = {&layer.gate_up->view, own.rounded.view(own.normed.as<float>(), layer.gate_up->view.k),
                           layer.gate_up_bias, model_.gate_up.as<float>()};
    uint8_t *scratch = model_.engine->scratch[(size_t)thread].as<uint8_t>();
    for (const Range &blocks : {gate, up}) kernels_.linear(job, {0, own.num_live}, blocks, scratch);
    const Activations in = model_.rounded.view(model_.normed.as<float>(), inner);
    const int64_t at = groups.low * GROUP, width = (groups.high - groups.low) * GROUP;
    for (int64_t row = 0; row < own.num_live; row++) {
        const float *from = model_.gate_up.as<float>() + row * 2 * inner;
        float *out = model_.normed.as<float>() + row * inner;
        kernels_.activate_row(layer.activation, from + at, from + inner + at, width, out + at);
        if (layer.down->view.is_grouped()) kernels_.round_row(in, row, groups, out);
    }
    end_stage(thread, LINEARS);
    linear(thread, in, layer.down, layer.down_bias, model_.delta.as<float>());
    end_stage(thread, LINEARS);
}

}  // namespace

bool are_few(const BatonModel &model, const Request &request) {
    const BatonTables &tables = *request.tables;
    if (model.engine->pool.size() == 1 || std::max(tables.num_tokens, request.num_rows) > FEW_ROWS) return false;
    const BatonAttention &a = model.layers[0].attention;
    for (int64_t s = 0; s < tables.num_spans; s++)  // one unit per request and KV head
        if (tables.spans[s].num_tokens > std::max<int64_t>(1, MAX_ATTENTION_ROWS / (a.num_heads / a.num_kv_heads)))
            return false;
    return std::all_of(model.layers.begin(), model.layers.end(), [](const BatonLayer &layer) {
        return layer.down->view.k % GROUP == 0 && layer.gate_up->view.n == 2 * layer.down->view.k;
    });
}

bool step_few(BatonModel &model, const Request &request) {
    FewRows step(model, request);
    model.engine->pool.run([&](int thread) { step.walk(thread); });
    return !step.is_stopped();
}

}  // namespace baton
