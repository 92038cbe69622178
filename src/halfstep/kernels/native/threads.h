// Threads: all elements of all tensors, shared between those torch has.

#pragma once

#include <algorithm>
#include <cstdint>

namespace {

using Fork = void (*)(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel
using Ask = int (*)();

struct Threads {
    int64_t count;
    Fork fork;
    Ask mine, all;  // omp_get_thread_num, omp_get_num_threads
};

template <class Work>
void in_parallel(const Threads &threads, int64_t total, const Work &work) {
    struct Region {
        const Threads &threads;
        int64_t total;
        const Work &work;
        static void enter(void *self) {
            const Region &region = *static_cast<Region *>(self);
            int64_t mine = region.threads.mine(), all = region.threads.all();
            region.work(region.total / all * mine + std::min(mine, region.total % all),
                        region.total / all * (mine + 1) + std::min(mine + 1, region.total % all));
        }
    } region{threads, total, work};
    if (threads.count > 1 && threads.fork)
        threads.fork(Region::enter, &region, unsigned(threads.count), 0);
    else
        work(0, total);
}

// Calls visit(n, from, to) for the part of tensor n that lies in [begin, end) of all elements, in whole `grain`s of it.
template <class Size, class Visit>
void walk(int64_t tensors, const Size &size, int64_t begin, int64_t end, int64_t grain, const Visit &visit) {
    int64_t offset = 0;
    for (int64_t n = 0; n < tensors && offset < end; offset += size(n++)) {
        auto inside = [&](int64_t at) {
            at = std::max<int64_t>(at - offset, 0);
            return std::min((at + grain - 1) / grain * grain, size(n));
        };
        if (inside(begin) < inside(end)) visit(n, inside(begin), inside(end));
    }
}

}  // namespace
