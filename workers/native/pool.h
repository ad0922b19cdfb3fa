// Helper threads of one engine: spinning while a step runs and for a moment after it, asleep otherwise.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace baton {

class Pool {
public:
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    int size() const { return num_threads_; }

    // body(thread) on every thread, the caller's being 0; returns when all have returned.
    void run(const std::function<void(int)> &body);

    // Inside run: returns when every thread has come here as often as the caller.
    void barrier();

private:
    void serve(int thread);
    bool await_round(uint64_t seen);    // false when the pool closes

    const int num_threads_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    const std::function<void(int)> *body_ = nullptr;
    bool is_closing_ = false;
    std::atomic<int> sleepers_{0};
    alignas(64) std::atomic<uint64_t> round_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
};

}  // namespace baton
