// Exponents: rows as in `reference/exponents.py`.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "formats.h"
#include "threads.h"

namespace {

constexpr int LOWEST = -192, BINS = 384, POWERS = BINS;
constexpr int ZEROS = 2 * BINS, INFS = ZEROS + 1, NANS = ZEROS + 2, NEGATIVES = ZEROS + 3;
constexpr int LARGEST = ZEROS + 4, SMALLEST = ZEROS + 5, ROW = ZEROS + 6;
constexpr int64_t TOP = int64_t(0x7FF) << 52;

// What a thread has seen of one tensor of words with EXPONENT and MANTISSA bits. Four counters a bin, so that equal
// exponents in a row do not wait for each other.
template <class Word, int EXPONENT, int MANTISSA>
struct Exponents {
    static constexpr int FIELDS = 1 << EXPONENT, BIAS = FIELDS / 2 - 1, WIDTH = EXPONENT + MANTISSA + 1;
    static constexpr Word SIGN = Word(1) << (WIDTH - 1), SIZE = SIGN - 1, FRACTION = (Word(1) << MANTISSA) - 1;
    static constexpr Word ENDLESS = SIZE - FRACTION;
    static constexpr int64_t ROUND = int64_t(1) << 30;  // elements after which 32-bit counters are emptied

    uint32_t fields[4][FIELDS] = {}, powers[FIELDS] = {}, low[MANTISSA] = {}, low_powers[MANTISSA] = {};
    int64_t zeros = 0, infs = 0, nans = 0, negatives = 0;
    Word largest = 0, below_smallest = ~Word(0);

    void add(const Word *__restrict x, int64_t count) {
        Word most = 0, least = ~Word(0), none = 0, even = 0, under = 0;
        for (int64_t i = 0; i < count; i++) {
            Word size = x[i] & SIZE;
            most = std::max(most, size);
            least = std::min(least, Word(size - 1));  // that of zero is larger than all others
            none += size == 0;
            even += (size & FRACTION) == 0;
            under += Word(x[i] - SIGN - 1) <= Word(ENDLESS - 1);  // sign set, neither zero nor nan
        }
        int64_t i = 0;
        auto field = [&](int64_t at) { return (x[at] & SIZE) >> MANTISSA; };
        for (; i + 4 <= count; i += 4)
            for (int lane = 0; lane < 4; lane++) fields[lane][field(i + lane)]++;
        for (; i < count; i++) fields[0][field(i)]++;
        if (even > none)
            for (i = 0; i < count; i++)
                if (!(x[i] & FRACTION)) powers[field(i)]++;
        if (most >= ENDLESS) most = special(x, count);
        if (least < FRACTION) subnormals(x, count);
        zeros += none;
        negatives += under;
        largest = std::max(largest, most);
        below_smallest = std::min(below_smallest, least < ENDLESS - 1 ? least : ~Word(0));
    }

    void add_many(Word x, uint32_t count) {
        Word size = x & SIZE, field = size >> MANTISSA;
        bool power = (size & FRACTION) == 0;
        zeros += size == 0 ? count : 0;
        infs += size == ENDLESS ? count : 0;
        nans += size > ENDLESS ? count : 0;
        negatives += Word(x - SIGN - 1) <= Word(ENDLESS - 1) ? count : 0;
        if (!size || size >= ENDLESS) return;
        largest = std::max(largest, size);
        below_smallest = std::min(below_smallest, Word(size - 1));
        if (field) {
            fields[0][field] += count;
            powers[field] += power ? count : 0;
        } else {
            int bit = 63 - __builtin_clzll(size);
            low[bit] += count;
            low_powers[bit] += size & (size - 1) ? 0 : count;
        }
    }

    Word special(const Word *x, int64_t count) {
        Word most = 0;
        for (int64_t i = 0; i < count; i++) {
            Word size = x[i] & SIZE;
            infs += size == ENDLESS;
            nans += size > ENDLESS;
            if (size < ENDLESS) most = std::max(most, size);
        }
        return most;
    }

    void subnormals(const Word *x, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            Word size = x[i] & SIZE;
            if (!size || size > FRACTION) continue;
            int bit = 63 - __builtin_clzll(size);
            low[bit]++;
            low_powers[bit] += !(size & (size - 1));
        }
    }

    static int64_t wide(Word size) {  // as float64
        if constexpr (WIDTH == 64) return int64_t(size);
        double value = real(uint32_t(size));
        int64_t pattern;
        std::memcpy(&pattern, &value, 8);
        return pattern;
    }

    // Adds all this to a row, to which other threads may add too.
    void flush(int64_t *row) {
        auto more = [&](int place, int64_t count) {
            if (count) __atomic_fetch_add(row + place, count, __ATOMIC_RELAXED);
        };
        auto most = [&](int place, int64_t value) {
            int64_t old = __atomic_load_n(row + place, __ATOMIC_RELAXED);
            while (old < value && !__atomic_compare_exchange_n(row + place, &old, value, false, __ATOMIC_RELAXED,
                                                               __ATOMIC_RELAXED)) {
            }
        };
        auto bin = [&](int exponent, int64_t count, int64_t powers) {
            int place = std::min(std::max(exponent - LOWEST, 0), BINS - 1);
            more(place, count);
            if (place > 0 && place < BINS - 1) more(POWERS + place, powers);
        };
        for (int field = 1; field < FIELDS - 1; field++) {
            int64_t count = 0;
            for (int lane = 0; lane < 4; lane++) count += fields[lane][field];
            bin(field - BIAS, count, powers[field]);
        }
        for (int bit = 0; bit < MANTISSA; bit++) bin(bit + 1 - BIAS - MANTISSA, low[bit], low_powers[bit]);
        more(ZEROS, zeros);
        more(INFS, infs);
        more(NANS, nans);
        more(NEGATIVES, negatives);
        if (largest) most(LARGEST, wide(largest));
        if (below_smallest != ~Word(0)) most(SMALLEST, TOP - wide(below_smallest + 1));
        *this = Exponents{};
    }
};

// The same for many words of 16 bits: every pattern is counted, and afterwards each is read once.
template <class Low>
void count_patterns(const uint16_t *x, int64_t count, int64_t *row) {
    constexpr int64_t PATTERNS = 1 << 16, ROUND = int64_t(1) << 30;
    std::unique_ptr<uint32_t[]> seen(new uint32_t[PATTERNS]);
    for (int64_t begin = 0; begin < count; begin += ROUND) {
        std::fill_n(seen.get(), PATTERNS, 0);
        for (int64_t i = begin, end = std::min(count, begin + ROUND); i < end; i++) seen[x[i]]++;
        Exponents<uint32_t, 8, 23> found;
        for (int64_t pattern = 0; pattern < PATTERNS; pattern++)
            if (seen[pattern]) found.add_many(bits(Low::widen(uint16_t(pattern))), seen[pattern]);
        found.flush(row);
    }
}

constexpr int64_t MANY = 1 << 16;    // elements from which it is faster
constexpr int64_t COUNTED = 4096;  // elements that are widened and counted in one go

}  // namespace

extern "C" {

// `columns` is that of norms; row n gets what is in tensor n.
void halfstep_exponents(int64_t *rows, const int64_t *columns, int64_t tensors, const Threads *threads) {
    const int64_t *sizes = columns, *types = columns + tensors, *addresses = types + tensors;
    int64_t total = 0;
    for (int64_t n = 0; n < tensors; n++) total += sizes[n];
    auto size = [&](int64_t n) { return sizes[n]; };
    in_parallel(*threads, total, [&](int64_t begin, int64_t end) {
        alignas(64) float scratch[COUNTED];
        walk(tensors, size, begin, end, COUNTED, [&](int64_t n, int64_t from, int64_t to) {
            const void *memory = reinterpret_cast<void *>(addresses[n]);
            auto all = [&](auto &found, const auto &words) {
                for (int64_t at = from; at < to; at += COUNTED) {
                    found.add(words(at, std::min(COUNTED, to - at)), std::min(COUNTED, to - at));
                    if ((at - from + COUNTED) % found.ROUND == 0) found.flush(rows + n * ROW);
                }
                found.flush(rows + n * ROW);
            };
            if (to - from >= MANY && (types[n] == BF16 || types[n] == FP16)) {
                const uint16_t *low = static_cast<const uint16_t *>(memory) + from;
                (types[n] == BF16 ? count_patterns<Bf16> : count_patterns<Fp16>)(low, to - from, rows + n * ROW);
            } else if (types[n] == FP64) {
                std::unique_ptr<Exponents<uint64_t, 11, 52>> found(new Exponents<uint64_t, 11, 52>);
                all(*found, [&](int64_t at, int64_t) { return static_cast<const uint64_t *>(memory) + at; });
            } else {
                Exponents<uint32_t, 8, 23> found;
                uint32_t patterns[COUNTED];
                all(found, [&](int64_t at, int64_t count) {
                    std::memcpy(patterns, widened(scratch, memory, types[n], at, count), 4 * count);
                    return patterns;
                });
            }
        });
    });
}

}  // extern "C"
