// The tail's operators on CPU: what `updates.py` says, each byte read once and written once. Called by `native.py`.
//
// Compiled on the machine it runs on, without torch's headers: tensors come as addresses and sizes. Loops are written
// so that compilers vectorise them: one result an iteration, branches only as selects. Nothing may be fused, reordered
// or flushed to zero (-ffp-contract=off, no -ffast-math): results are `updates.py`'s bit for bit, but for those of NaN.
//
// Work goes in pieces of PIECE elements. A piece is widened to fp32 in scratch that stays in the L1 cache, updated
// there and narrowed again; what is fp32 already is updated where it is. So formats do not multiply with optimizers.
//
// Threads are those torch has: the caller hands over the entry of its OpenMP runtime, and none is linked. Thread t of T
// takes the t-th part of all elements of all tensors; only whole pieces, so results do not depend on T.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace {

constexpr int64_t PIECE = 512;   // 5 scratch arrays of 2 KiB stay in 32 KiB of L1 beside what streams through
constexpr int64_t BLOCK = 4096;  // elements of a norm that are summed in fp32
constexpr int LANES = 64;        // sums side by side in a block: enough for four vectors of 16
constexpr float CLIP_EPS = 1e-6f;

enum Type : int64_t { FP32, BF16, FP16, INT16, FP64 };
enum Form : int64_t { PLAIN, COPY, SPLIT, KAHAN, STOCHASTIC };
enum Stream : uint32_t { WEIGHT, FIRST, SECOND };

// ------------------------------------------------------------------ bit patterns

inline uint32_t bits(float value) {
    uint32_t pattern;
    std::memcpy(&pattern, &value, 4);
    return pattern;
}

inline float real(uint32_t pattern) {
    float value;
    std::memcpy(&value, &pattern, 4);
    return value;
}

constexpr uint32_t INFINITE = 0x7F800000, MAGNITUDE = 0x7FFFFFFF;

inline bool is_nan(uint32_t pattern) { return (pattern & MAGNITUDE) > INFINITE; }

struct Bf16 {
    static float widen(uint16_t low) { return real(uint32_t(low) << 16); }
    static uint16_t narrow(float value) {  // half to even
        uint32_t pattern = bits(value), odd = (pattern >> 16) & 1;
        return uint16_t((is_nan(pattern) ? pattern | 0x400000 : pattern + 0x7FFF + odd) >> 16);
    }
};

struct Fp16 {
    static float widen(uint16_t low) {
        uint32_t sign = uint32_t(low & 0x8000) << 16, moved = uint32_t(low & 0x7FFF) << 13;
        uint32_t normal = moved + ((127 - 15) << 23), special = normal + ((128 - 16) << 23);
        uint32_t subnormal = bits(real(moved + (113u << 23)) - real(113u << 23));  // 113 - 127: its exponent, -14
        uint32_t pattern = moved < 0x800000 ? subnormal : moved >= 0xF800000 ? special : normal;
        return real(pattern | sign);
    }
    static uint16_t narrow(float value) {  // half to even
        uint32_t pattern = bits(value), size = pattern & MAGNITUDE, odd = (size >> 13) & 1;
        uint32_t normal = (size - ((127 - 15) << 23) + 0xFFF + odd) >> 13;
        uint32_t subnormal = bits(real(size) + 0.5f) - bits(0.5f);  // the lowest bit of 0.5 is fp16's smallest number
        uint32_t special = is_nan(size) ? 0x7E00 : 0x7C00;
        uint32_t low = size >= 143u << 23 ? special : size < 113u << 23 ? subnormal : normal;  // 2**16 and 2**-14
        return uint16_t(low | ((pattern >> 16) & 0x8000));
    }
};

inline uint32_t mix(uint32_t word) {  // "lowbias32" of Chris Wellons (public domain)
    word = (word ^ (word >> 16)) * 0x7FEB352Du;
    word = (word ^ (word >> 15)) * 0x846CA68Bu;
    return word ^ (word >> 16);
}

inline uint16_t by_chance(float value, uint32_t noise) {  // to bf16; what is not finite stays (a NaN that was
    uint32_t pattern = bits(value);                        // worked out has its quiet bit, which bf16 keeps)
    return uint16_t((pattern + ((pattern & MAGNITUDE) < INFINITE ? noise : 0)) >> 16);
}

// ------------------------------------------------------------------ whole pieces

template <class Low>
void widen_all(float *__restrict wide, const uint16_t *__restrict low, int64_t count) {
    for (int64_t i = 0; i < count; i++) wide[i] = Low::widen(low[i]);
}

template <class Low>
void narrow_all(uint16_t *__restrict low, const float *__restrict wide, int64_t count) {
    for (int64_t i = 0; i < count; i++) low[i] = Low::narrow(wide[i]);
}

void scramble(uint32_t *__restrict mixed, uint32_t at, int64_t count) {  // what all streams of noise share
    for (int64_t i = 0; i < count; i++) mixed[i] = mix(at + uint32_t(i));
}

void narrow_by_chance(uint16_t *__restrict low, const float *__restrict wide, const uint32_t *__restrict mixed,
                      int64_t count, uint32_t key) {
    for (int64_t i = 0; i < count; i++) low[i] = by_chance(wide[i], mix(key ^ mixed[i]) >> 16);
}

void join(float *__restrict wide, const uint16_t *__restrict low, const uint16_t *__restrict rest, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t upper = uint32_t(low[i]) << 16, lower = rest[i];
        uint32_t taken = is_nan(upper) ? 0 : (lower & 0x8000) << 1;  // rounding up had added it
        wide[i] = real((upper - taken) | lower);
    }
}

void split(uint16_t *__restrict low, uint16_t *__restrict rest, const float *__restrict wide, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t pattern = bits(wide[i]);
        low[i] = uint16_t((is_nan(pattern) ? pattern | 0x400000 : pattern + 0x8000) >> 16);
        rest[i] = uint16_t(pattern);
    }
}

template <class Low>
void add(float *__restrict wide, const uint16_t *__restrict low, const uint16_t *__restrict rest, int64_t count) {
    for (int64_t i = 0; i < count; i++) wide[i] = Low::widen(low[i]) + Low::widen(rest[i]);
}

template <class Low>
void compensate(uint16_t *__restrict low, uint16_t *__restrict rest, const float *__restrict wide, int64_t count) {
    auto lost = [](float value, float kept) {
        float difference = value - kept;
        uint32_t finite = (bits(difference) & MAGNITUDE) < INFINITE ? ~0u : 0;
        return Low::narrow(real(bits(difference) & finite));
    };
    for (int64_t i = 0; i < count; i++) {
        float kept = Low::widen(Low::narrow(wide[i])), sum = kept + Low::widen(lost(wide[i], kept));
        uint16_t again = Low::narrow(sum);  // settles ties: packing the sum once more gives the same two numbers
        low[i] = again;
        rest[i] = lost(sum, Low::widen(again));
    }
}

// ------------------------------------------------------------------ what the caller hands over

using Fork = void (*)(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel
using Ask = int (*)();

struct Threads {
    int64_t count;
    Fork fork;
    Ask mine, all;  // omp_get_thread_num, omp_get_num_threads
};

struct Job {
    int64_t tensors;
    Threads threads;
    int64_t form, start, wide_rate, decoupled, maximize, nesterov;
    const float *factor;
    const bool *bad;
    const int64_t *draws;
    const void *rate;
    double lr, beta1, beta2, eps, weight_decay;
};

struct Parameter {  // what is absent has address 0
    int64_t size, type, beside_type, first_type, second_type, gradient_type;
    void *weight, *beside, *first, *second;
    float *step;
    const void *gradient;
};

using Parameters = std::vector<Parameter>;

// `columns` holds the fields of `Parameter` in turn, each for all tensors.
Parameters rows(const int64_t *columns, int64_t tensors) {
    static_assert(sizeof(Parameter) % sizeof(int64_t) == 0 && sizeof(void *) == sizeof(int64_t), "a table of words");
    Parameters parameters(tensors);
    int64_t *words = reinterpret_cast<int64_t *>(parameters.data());
    constexpr int64_t FIELDS = sizeof(Parameter) / sizeof(int64_t);
    for (int64_t field = 0; field < FIELDS; field++)
        for (int64_t n = 0; n < tensors; n++) std::memcpy(words + n * FIELDS + field, columns++, sizeof(int64_t));
    return parameters;
}

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

// ------------------------------------------------------------------ an update, whatever the optimizer

struct Scratch {
    alignas(64) float value[PIECE], gradient[PIECE], first[PIECE], second[PIECE];
    alignas(64) uint32_t mixed[PIECE];
};

const float *widened(float *scratch, const void *memory, int64_t type, int64_t at, int64_t count) {
    if (type == FP32) return static_cast<const float *>(memory) + at;
    const uint16_t *low = static_cast<const uint16_t *>(memory) + at;
    type == BF16 ? widen_all<Bf16>(scratch, low, count) : widen_all<Fp16>(scratch, low, count);
    return scratch;
}

uint32_t key_of(const Job &job, int64_t tensor, Stream stream) {
    if (!job.draws) return 0;
    uint64_t seed = uint64_t(job.draws[0]);
    uint32_t key = mix(uint32_t(seed));
    key = mix(key ^ uint32_t(seed >> 32));
    key = mix(key ^ uint32_t(job.draws[1]));
    return mix(key ^ uint32_t(4 * (job.start + tensor) + stream));
}

float *take(const Job &job, const Parameter &p, float *scratch, int64_t at, int64_t count) {
    const uint16_t *low = static_cast<uint16_t *>(p.weight) + at, *rest = static_cast<uint16_t *>(p.beside) + at;
    if (job.form == SPLIT)
        join(scratch, low, rest, count);
    else if (job.form == KAHAN)
        p.type == BF16 ? add<Bf16>(scratch, low, rest, count) : add<Fp16>(scratch, low, rest, count);
    else
        return const_cast<float *>(widened(scratch, p.weight, p.type, at, count));
    return scratch;
}

void put(const Job &job, const Parameter &p, const Scratch &scratch, const float *value, int64_t at, int64_t count,
         uint32_t key) {
    uint16_t *low = static_cast<uint16_t *>(p.weight) + at, *rest = static_cast<uint16_t *>(p.beside) + at;
    bool bf16 = (job.form == COPY ? p.beside_type : p.type) == BF16;
    if (job.form == SPLIT)
        split(low, rest, value, count);
    else if (job.form == KAHAN)
        bf16 ? compensate<Bf16>(low, rest, value, count) : compensate<Fp16>(low, rest, value, count);
    else if (job.form == STOCHASTIC)
        narrow_by_chance(low, value, scratch.mixed, count, key);
    else if (job.form == COPY)
        bf16 ? narrow_all<Bf16>(rest, value, count) : narrow_all<Fp16>(rest, value, count);
    else if (p.type != FP32)
        bf16 ? narrow_all<Bf16>(low, value, count) : narrow_all<Fp16>(low, value, count);
}

void put_state(void *memory, int64_t type, const Scratch &scratch, const float *value, int64_t at, int64_t count,
               uint32_t key) {
    if (memory && type == BF16)
        narrow_by_chance(static_cast<uint16_t *>(memory) + at, value, scratch.mixed, count, key);
}

// Runs rule(n, value, gradient, first, second, count) over all pieces, all of them fp32 and updated in place.
template <class Rule>
void update(const Job &job, const Parameters &parameters, const Rule &rule) {
    int64_t total = 0;
    for (int64_t n = 0; n < job.tensors; n++) total += parameters[n].size;
    auto size = [&](int64_t n) { return parameters[n].size; };
    in_parallel(job.threads, total, [&](int64_t begin, int64_t end) {
        Scratch scratch{};
        walk(job.tensors, size, begin, end, PIECE, [&](int64_t n, int64_t from, int64_t to) {
            const Parameter &p = parameters[n];
            bool chance = job.form == STOCHASTIC || p.first_type == BF16 || p.second_type == BF16;
            uint32_t keys[] = {key_of(job, n, WEIGHT), key_of(job, n, FIRST), key_of(job, n, SECOND)};
            for (int64_t at = from; at < to; at += PIECE) {
                int64_t count = std::min(PIECE, to - at);
                float *value = take(job, p, scratch.value, at, count);
                const float *gradient = widened(scratch.gradient, p.gradient, p.gradient_type, at, count);
                auto state = [&](float *wide, void *memory, int64_t type) {
                    return memory ? const_cast<float *>(widened(wide, memory, type, at, count)) : wide;
                };
                float *first = state(scratch.first, p.first, p.first_type);
                float *second = state(scratch.second, p.second, p.second_type);
                rule(n, value, gradient, first, second, count);
                if (chance) scramble(scratch.mixed, uint32_t(at), count);
                put_state(p.first, p.first_type, scratch, first, at, count, keys[FIRST]);
                put_state(p.second, p.second_type, scratch, second, at, count, keys[SECOND]);
                put(job, p, scratch, value, at, count, keys[WEIGHT]);
            }
        });
    });
}

double learning_rate(const Job &job) {
    if (!job.rate) return job.lr;
    return job.wide_rate ? *static_cast<const double *>(job.rate) : *static_cast<const float *>(job.rate);
}

float signed_factor(const Job &job) { return job.maximize ? -*job.factor : *job.factor; }

float norm_of(double squares) {  // inf where fp32 would have it
    return squares > FLT_MAX ? INFINITY : float(std::sqrt(squares));
}

}  // namespace

// ------------------------------------------------------------------ the operators
//
// Parameters of the inner loops are plain values: a compiler cannot know that a field does not change under a store.

namespace {

void adam(float *__restrict value, const float *__restrict gradient, float *__restrict first, float *__restrict second,
          int64_t count, float factor, float keep, float decay, bool coupled, float part1, float beta2, float part2,
          float size, float root, float eps) {
    for (int64_t i = 0; i < count; i++) {
        float slope = gradient[i] * factor, old = value[i] * keep;
        slope = coupled ? slope + value[i] * decay : slope;
        float mean = first[i] + (slope - first[i]) * part1;
        float square = second[i] * beta2 + slope * slope * part2;
        first[i] = mean;
        second[i] = square;
        value[i] = old - size * (mean / (std::sqrt(square) / root + eps));
    }
}

void sgd(float *__restrict value, const float *__restrict gradient, float *__restrict held, int64_t count, float factor,
         float decay, bool coupled, bool moving, float momentum, bool nesterov, float rate) {
    for (int64_t i = 0; i < count; i++) {
        float slope = gradient[i] * factor;
        slope = coupled ? slope + value[i] * decay : slope;
        float after = held[i] * momentum + slope;
        held[i] = after;
        slope = moving ? (nesterov ? slope + after * momentum : after) : slope;
        value[i] = value[i] - slope * rate;
    }
}

void lion(float *__restrict value, const float *__restrict gradient, float *__restrict held, int64_t count,
          float factor, float keep, float part1, float part2, float rate) {
    for (int64_t i = 0; i < count; i++) {
        float away = gradient[i] * factor - held[i], way = held[i] + away * part1;
        float sign = float(way > 0.0f) - float(way < 0.0f);
        held[i] = held[i] + away * part2;
        value[i] = value[i] * keep - sign * rate;
    }
}

// ------------------------------------------------------------------ exponents: what `exponents.py` says of a row

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
    int64_t zeros = 0, infs = 0, nans = 0, negatives = 0, seen = 0;
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

// The same for many words of 16 bits: every pattern is counted, and afterwards each is looked at once.
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

constexpr int64_t MANY = 1 << 16;  // elements from which it is faster

}  // namespace

extern "C" {

void halfstep_adam(const Job *job, const int64_t *columns) {
    if (*job->bad) return;
    Parameters parameters = rows(columns, job->tensors);
    double lr = learning_rate(*job), beta1 = job->beta1, beta2 = job->beta2;
    std::vector<float> size(job->tensors), root(job->tensors);
    float last = -1.0f;
    for (int64_t n = 0; n < job->tensors; n++) {
        float count = *parameters[n].step += 1.0f;
        bool same = n > 0 && count == last;  // as a rule: then the powers are those before
        size[n] = same ? size[n - 1] : float(lr / (1 - std::pow(beta1, double(count))));
        root[n] = same ? root[n - 1] : float(std::pow(1 - std::pow(beta2, double(count)), 0.5));
        last = count;
    }
    float factor = signed_factor(*job), keep = job->decoupled ? float(1 - lr * job->weight_decay) : 1.0f;
    bool coupled = !job->decoupled && job->weight_decay != 0;
    update(*job, parameters, [&](int64_t n, float *value, const float *slope, float *first, float *second, int64_t count) {
        adam(value, slope, first, second, count, factor, keep, float(job->weight_decay), coupled, float(1 - beta1),
             float(beta2), float(1 - beta2), size[n], root[n], float(job->eps));
    });
}

void halfstep_sgd(const Job *job, const int64_t *columns) {
    if (*job->bad) return;
    Parameters parameters = rows(columns, job->tensors);
    float factor = signed_factor(*job), rate = float(learning_rate(*job));
    update(*job, parameters, [&](int64_t n, float *value, const float *gradient, float *held, float *, int64_t count) {
        sgd(value, gradient, held, count, factor, float(job->weight_decay), job->weight_decay != 0, parameters[n].first,
            float(job->beta1), job->nesterov, rate);
    });
}

void halfstep_lion(const Job *job, const int64_t *columns) {
    if (*job->bad) return;
    Parameters parameters = rows(columns, job->tensors);
    double lr = learning_rate(*job);
    float factor = signed_factor(*job), keep = float(1 - lr * job->weight_decay);
    update(*job, parameters, [&](int64_t, float *value, const float *gradient, float *held, float *, int64_t count) {
        lion(value, gradient, held, count, factor, keep, float(1 - job->beta1), float(1 - job->beta2), float(lr));
    });
}

// `columns` holds `tensors` sizes, as many types, as many addresses.
void halfstep_norms(float *norms, const int64_t *columns, int64_t tensors, const Threads *threads) {
    const int64_t *sizes = columns, *types = columns + tensors, *addresses = types + tensors;
    std::vector<int64_t> begins(tensors + 1);
    int64_t total = 0;
    for (int64_t n = 0; n < tensors; total += sizes[n++]) begins[n + 1] = begins[n] + (sizes[n] + BLOCK - 1) / BLOCK;
    std::vector<double> sums(begins[tensors]);
    auto size = [&](int64_t n) { return sizes[n]; };
    in_parallel(*threads, total, [&](int64_t begin, int64_t end) {
        alignas(64) float scratch[BLOCK];
        walk(tensors, size, begin, end, BLOCK, [&](int64_t n, int64_t from, int64_t to) {
            for (int64_t at = from; at < to; at += BLOCK) {
                int64_t count = std::min(BLOCK, to - at), i = 0;
                const float *x = widened(scratch, reinterpret_cast<void *>(addresses[n]), types[n], at, count);
                float lanes[LANES] = {};
                for (; i + LANES <= count; i += LANES)
                    for (int lane = 0; lane < LANES; lane++) lanes[lane] += x[i + lane] * x[i + lane];
                for (int lane = 0; i < count; i++, lane++) lanes[lane] += x[i] * x[i];
                double sum = 0;
                for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
                sums[begins[n] + at / BLOCK] = sum;
            }
        });
    });
    for (int64_t n = 0; n < tensors; n++) {
        double squares = 0;
        for (int64_t block = begins[n]; block < begins[n + 1]; block++) squares += sums[block];
        norms[n] = norm_of(squares);
    }
}

// `columns` is that of norms; row n gets what is in tensor n.
void halfstep_exponents(int64_t *rows, const int64_t *columns, int64_t tensors, const Threads *threads) {
    const int64_t *sizes = columns, *types = columns + tensors, *addresses = types + tensors;
    int64_t total = 0;
    for (int64_t n = 0; n < tensors; n++) total += sizes[n];
    auto size = [&](int64_t n) { return sizes[n]; };
    in_parallel(*threads, total, [&](int64_t begin, int64_t end) {
        alignas(64) float scratch[BLOCK];
        walk(tensors, size, begin, end, BLOCK, [&](int64_t n, int64_t from, int64_t to) {
            const void *memory = reinterpret_cast<void *>(addresses[n]);
            auto all = [&](auto &found, const auto &words) {
                for (int64_t at = from; at < to; at += BLOCK) {
                    found.add(words(at, std::min(BLOCK, to - at)), std::min(BLOCK, to - at));
                    if ((at - from + BLOCK) % found.ROUND == 0) found.flush(rows + n * ROW);
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
                uint32_t patterns[BLOCK];
                all(found, [&](int64_t at, int64_t count) {
                    std::memcpy(patterns, widened(scratch, memory, types[n], at, count), 4 * count);
                    return patterns;
                });
            }
        });
    });
}

void halfstep_judge(const float *norms, int64_t count, const float *divisor, const float *clip_norm, float *norm,
                    bool *bad, float *factor) {
    double squares = 0;
    for (int64_t n = 0; n < count; n++) squares += double(norms[n]) * norms[n];
    float whole = divisor ? *divisor : 1.0f;
    *norm = norm_of(squares) / whole;
    *bad = !std::isfinite(*norm);
    if (clip_norm) {
        float over = (*norm + CLIP_EPS) / *clip_norm;
        whole *= over < 1.0f ? 1.0f : over;
    }
    *factor = 1.0f / whole;
}

}  // extern "C"
