// A whole forward pass of a dense decoder in one call.
//
// Every thread walks through the same stages; they meet where one reads what another wrote. Columns of a linear are
// shared out evenly, attention units are taken one by one. Who computes a part goes on with it where nobody else is
// asked: a unit turns and stores the heads it attends with and rounds what it leaves for the next linear, and gate and
// up of a column are computed, activated and rounded by one thread. So a layer is
//
//     [norm |] qkv | attention | out | [norm |] gate, up, activation | down |
//
// with a meeting at each bar; the two in brackets fall away where rows are few and every thread norms them all.
// From the last layer's attention on, only the asked rows go on: nobody reads the others.
#include <string.h>
#include <time.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "model.h"

using namespace baton;

namespace {

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000 + t.tv_nsec;
}

// What one thread does of a step. Thread 0 is the caller's: it tells the listener and takes the time.
class Walk {
public:
    Walk(BatonModel &model, const Request &request, const Plan &plan, bool &is_stopped, int thread);
    void run();

private:
    void embed();
    bool walk_layer(const BatonLayer &layer, int64_t index);
    void walk_mlp(const BatonLayer &layer);
    void walk_head();

    void enter(const float *norm, const float *after_norm, bool has_delta, const BatonMatrix *next);
    void linear(const BatonMatrix *weight, const Activations &in, const float *bias, float *out);
    void rotate(const BatonLayer &layer, const BatonCache &cache);
    void attend(const BatonLayer &layer, const BatonCache &cache, int64_t index, bool turns);
    void leave_unit(const AttentionUnit &unit, const BatonLayer &layer);
    void gate_up(const BatonLayer &layer);
    void activate(const BatonLayer &layer, Range rows, Range columns);
    void tell(int64_t layer);

    void meet(Stage stage);
    void take_time(Stage stage);
    Range share(int64_t count) const { return share_of(count, thread_, model_.engine->pool.size()); }
    Range own_rows() const { return plan_.are_rows_few ? Range{0, num_live_} : share(num_live_); }
    Activations normed(const BatonMatrix *reader) const {
        return lane_.rounded.view(lane_.normed.as<float>(), reader->view.k);
    }
    Activations inner(const BatonMatrix *reader) const {
        return model_.rounded_inner.view(model_.inner.as<float>(), reader->view.k);
    }

    BatonModel &model_;
    const Request &request_;
    const Plan &plan_;
    const Kernels &kernels_;
    bool &is_stopped_;          // written by thread 0 before a meeting, read after it
    const int thread_;
    Lane &lane_;
    float *x_;                  // rows that go on
    int64_t num_live_;
    bool is_dropping_ = false;  // the next norm takes the asked rows out of x
    int64_t stage_began_;
};

Walk::Walk(BatonModel &model, const Request &request, const Plan &plan, bool &is_stopped, int thread)
    : model_(model), request_(request), plan_(plan), kernels_(model.engine->kernels), is_stopped_(is_stopped),
      thread_(thread), lane_(model.lanes[plan.are_rows_few ? (size_t)thread : 0]), x_(lane_.x.as<float>()),
      num_live_(request.tables->num_tokens), stage_began_(thread ? 0 : now_ns()) {}

void Walk::take_time(Stage stage) {
    if (thread_) return;
    const int64_t now = now_ns();
    model_.stage_ns[stage] += now - stage_began_;
    stage_began_ = now;
}

void Walk::meet(Stage stage) {
    model_.engine->pool.barrier();
    take_time(stage);
}

void Walk::run() {
    embed();
    for (size_t i = 0; i < model_.layers.size(); i++)
        if (!walk_layer(model_.layers[i], (int64_t)i)) return;
    if (request_.num_rows) walk_head();
}

void Walk::embed() {
    const Range own = own_rows();
    for (int64_t row = own.low; row < own.high; row++) {
        float *x = x_ + row * model_.width;
        kernels_.unpack_row(model_.decoder.embedding->view, request_.ids[row], x);
        if (model_.decoder.embedding_scale != 1.0f) kernels_.scale_row(x, model_.decoder.embedding_scale, model_.width);
    }
}

// False when the step is over: stopped by the listener, or no row is asked for.
bool Walk::walk_layer(const BatonLayer &layer, int64_t index) {
    const bool is_last = index + 1 == (int64_t)model_.layers.size();
    const bool drops_rows = is_last && plan_.drops_rows, turns_first = drops_rows || !plan_.are_units_whole;
    const BatonCache cache = cache_of(*request_.cache, layer.attention, index);
    enter(layer.attention_norm, index ? model_.layers[index - 1].after_mlp_norm : nullptr, index > 0, layer.qkv);
    linear(layer.qkv, normed(layer.qkv), layer.qkv_bias, model_.qkv.as<float>());
    if (turns_first) {
        rotate(layer, cache);
        tell(index);
    }
    if (is_last && !request_.num_rows) return false;
    if (drops_rows) num_live_ = request_.num_rows;
    is_dropping_ = drops_rows;
    attend(layer, cache, index, !turns_first);
    if (!turns_first) tell(index);
    linear(layer.out, inner(layer.out), layer.out_bias, model_.delta.as<float>());
    if (is_stopped_) return false;
    walk_mlp(layer);
    return true;
}

void Walk::tell(int64_t layer) {
    if (!thread_ && request_.on_layer && request_.on_layer(layer)) is_stopped_ = true;
}

// x += delta where a linear left one; normed = norm(x), rounded where `next` wants it.
void Walk::enter(const float *norm, const float *after_norm, bool has_delta, const BatonMatrix *next) {
    const int64_t width = model_.width;
    const float eps = model_.decoder.norm_eps;
    const Range own = own_rows();
    const Activations in = normed(next);
    const float *from = x_;
    if (is_dropping_) x_ = lane_.kept.as<float>();
    for (int64_t row = own.low; row < own.high; row++) {
        float *x = x_ + row * width, *out = lane_.normed.as<float>() + row * width;
        const float *delta = model_.delta.as<float>() + row * width;
        if (is_dropping_) memcpy(x, from + request_.rows[row] * width, (size_t)width * 4);
        if (after_norm) {
            kernels_.norm_row(delta, after_norm, eps, width, out);
            delta = out;
        }
        if (has_delta) kernels_.add_row(x, delta, width);
        kernels_.norm_row(x, norm, eps, width, out);
        if (next->view.is_grouped()) kernels_.round_row(in, row, {0, num_groups(width)}, out);
    }
    is_dropping_ = false;
    if (plan_.are_rows_few) take_time(ROWS);
    else meet(ROWS);
}

void Walk::linear(const BatonMatrix *weight, const Activations &in, const float *bias, float *out) {
    const LinearJob job = {&weight->view, in, bias, out};
    model_.engine->linear(thread_, job, num_live_);
    meet(LINEARS);
}

void Walk::rotate(const BatonLayer &layer, const BatonCache &cache) {
    const Range own = share(num_live_);
    for (int64_t row = own.low; row < own.high; row++)
        model_.engine->rotate_and_store(layer.attention, *request_.tables, cache, row,
                                        model_.qkv.as<float>() + row * layer.qkv->view.n);
    meet(ROWS);
}

void Walk::attend(const BatonLayer &layer, const BatonCache &cache, int64_t index, bool turns) {
    const BatonAttention &a = layer.attention;
    const BatonTables &tables = *request_.tables;
    const int64_t width = layer.qkv->view.n;
    float *qkv = model_.qkv.as<float>(), *scratch = model_.engine->scratch[(size_t)thread_].as<float>();
    const AttentionJob job = {&a, &tables, cache, qkv, width, model_.inner.as<float>()};
    const std::vector<AttentionUnit> &units = is_dropping_ ? plan_.last_units : plan_.units;
    std::atomic<int64_t> &next = model_.next_unit[(size_t)index];
    for (size_t i = (size_t)next.fetch_add(1); i < units.size(); i = (size_t)next.fetch_add(1)) {
        const AttentionUnit &unit = units[i];
        const int64_t first = tables.spans[unit.span].first_row + unit.first_token;
        for (int64_t row = first; turns && row < first + unit.num_tokens; row++)
            model_.engine->rotate_group(a, tables, cache, row, unit.kv_head, qkv + row * width);
        kernels_.attend(job, unit, scratch);
        if (plan_.are_units_grouped) leave_unit(unit, layer);
    }
    meet(ATTENTION);
    if (plan_.are_units_grouped || !layer.out->view.is_grouped()) return;
    const Range own = share(num_live_);
    const Activations out = inner(layer.out);
    for (int64_t row = own.low; row < own.high; row++)
        kernels_.round_row(out, row, {0, num_groups(out.k)}, out.x + row * out.k);
    meet(ROWS);
}

// Rounds what a unit wrote.
void Walk::leave_unit(const AttentionUnit &unit, const BatonLayer &layer) {
    if (!layer.out->view.is_grouped()) return;
    const Activations out = inner(layer.out);
    const int64_t groups = num_groups(out.k) / layer.attention.num_kv_heads;
    for (int64_t row = unit.first_out; row < unit.first_out + unit.num_tokens; row++)
        kernels_.round_row(out, row, {unit.kv_head * groups, (unit.kv_head + 1) * groups}, out.x + row * out.k);
}

void Walk::walk_mlp(const BatonLayer &layer) {
    enter(layer.mlp_norm, layer.after_attention_norm, true, layer.gate_up);
    gate_up(layer);
    linear(layer.down, inner(layer.down), layer.down_bias, model_.delta.as<float>());
}

// Gate and up of a thread's columns, which it activates in whole groups.
void Walk::gate_up(const BatonLayer &layer) {
    const int64_t width = layer.down->view.k;
    if (width % GROUP) {
        linear(layer.gate_up, normed(layer.gate_up), layer.gate_up_bias, model_.gate_up.as<float>());
        activate(layer, share(num_live_), {0, width});
        meet(ROWS);
        return;
    }
    const Range groups = share(width / GROUP), columns = {groups.low * GROUP, groups.high * GROUP};
    const Range gate = {columns.low / LANES, columns.high / LANES};
    const Range up = {(width + columns.low) / LANES, (width + columns.high) / LANES};
    const LinearJob job = {&layer.gate_up->view, normed(layer.gate_up), layer.gate_up_bias, model_.gate_up.as<float>()};
    uint8_t *scratch = model_.engine->scratch[(size_t)thread_].as<uint8_t>();
    for (int64_t row = 0; row < num_live_; row += ROWS_PER_PASS) {
        const Range rows = {row, std::min(row + ROWS_PER_PASS, num_live_)};
        kernels_.linear(job, rows, gate, scratch);
        kernels_.linear(job, rows, up, scratch);
        activate(layer, rows, columns);
    }
    meet(LINEARS);
}

void Walk::activate(const BatonLayer &layer, Range rows, Range columns) {
    const Activations out = inner(layer.down);
    const Range groups = {columns.low / GROUP, columns.high / GROUP};
    for (int64_t row = rows.low; row < rows.high; row++) {
        const float *gate = model_.gate_up.as<float>() + row * 2 * out.k;
        float *activated = model_.inner.as<float>() + row * out.k;
        kernels_.activate_row(layer.activation, gate + columns.low, gate + out.k + columns.low,
                              columns.high - columns.low, activated + columns.low);
        if (layer.down->view.is_grouped()) kernels_.round_row(out, row, groups, activated);
    }
}

void Walk::walk_head() {
    const BatonMatrix *head = model_.decoder.head;
    enter(model_.decoder.norm, model_.layers.back().after_mlp_norm, true, head);
    const LinearJob job = {&head->view, normed(head), nullptr, request_.logits};
    model_.engine->linear(thread_, job, num_live_);
    meet(HEAD);
    if (model_.decoder.softcap <= 0.0f) return;
    const Range own = share(num_live_);
    for (int64_t row = own.low; row < own.high; row++)
        kernels_.softcap_row(request_.logits + row * head->view.n, model_.decoder.softcap, head->view.n);
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
        model->next_unit = std::vector<std::atomic<int64_t>>(model->layers.size());
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
        const Plan plan = make_plan(*model, request);
        model->reserve(request, plan);
        for (std::atomic<int64_t> &next : model->next_unit) next.store(0);
        bool is_stopped = false;
        model->engine->pool.run([&](int thread) { Walk(*model, request, plan, is_stopped, thread).run(); });
        return is_stopped ? BATON_STOPPED : BATON_OK;
    } catch (const std::bad_alloc &) {
        return BATON_NO_MEMORY;
    }
}

void baton_stage_ns(BatonModel *model, int64_t out[4]) {
    for (int i = 0; i < 4; i++) out[i] = std::exchange(model->stage_ns[i], 0);
}
