// Updates: the reference of each spec in `kernels/optimizers`.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "formats.h"
#include "threads.h"

namespace {

constexpr int64_t PIECE = 512;  // 5 scratch arrays of 2 KiB stay in 32 KiB of L1 beside what streams through

enum Form : int64_t { PLAIN, COPY, SPLIT, KAHAN, STOCHASTIC };
enum Stream : uint32_t { WEIGHT, FIRST, SECOND };

// ------------------------------------------------------------------ what the caller hands over

struct Job {
    int64_t tensors;
    Threads threads;
    int64_t form, start, wide_rate;
    const float *factor;
    const bool *bad;
    const int64_t *draws;
    const void *rate;
    double lr;
};

// A job, and the options of a spec in their order, all of them double.
struct Adam {
    Job job;
    double beta1, beta2, eps, weight_decay, decoupled, maximize;
};

struct NAdam {
    Job job;
    double beta1, beta2, eps, weight_decay, momentum_decay, decoupled, maximize;
};

struct Sgd {
    Job job;
    double momentum, weight_decay, nesterov, maximize;
};

struct Lion {
    Job job;
    double beta1, beta2, weight_decay, maximize;
};

struct Parameter {  // what is absent has address 0
    int64_t size, type, beside_type, first_type, second_type, gradient_type;
    void *weight, *beside, *first, *second;
    float *counters[2];
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

// ------------------------------------------------------------------ an update, whatever the optimizer

struct Scratch {
    alignas(64) float value[PIECE], gradient[PIECE], first[PIECE], second[PIECE];
    alignas(64) uint32_t mixed[PIECE];
};

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

template <class Options>
float signed_factor(const Options &given) {
    return given.maximize != 0 ? -*given.job.factor : *given.job.factor;
}

// ------------------------------------------------------------------ the optimizers
//
// Parameters of the inner loops are plain values: a compiler cannot know that a field does not change under a store.

void adam(float *__restrict value, const float *__restrict gradient, float *__restrict first, float *__restrict second,
          int64_t count, float factor, float keep, float decay, bool coupled, float part1, float beta2, float part2,
          float size, float root, float eps) {
    for (int64_t i = 0; i < count; i++) {
        float grad = gradient[i] * factor, old = value[i] * keep;
        grad = coupled ? grad + value[i] * decay : grad;
        float mean = first[i] + (grad - first[i]) * part1;
        float square = second[i] * beta2 + grad * grad * part2;
        first[i] = mean;
        second[i] = square;
        value[i] = old - size * (mean / (std::sqrt(square) / root + eps));
    }
}

void sgd(float *__restrict value, const float *__restrict gradient, float *__restrict mean, int64_t count, float factor,
         float decay, bool coupled, bool moving, float momentum, bool nesterov, float rate) {
    for (int64_t i = 0; i < count; i++) {
        float grad = gradient[i] * factor;
        grad = coupled ? grad + value[i] * decay : grad;
        float after = mean[i] * momentum + grad;
        mean[i] = after;
        grad = moving ? (nesterov ? grad + after * momentum : after) : grad;
        value[i] = value[i] - grad * rate;
    }
}

void lion(float *__restrict value, const float *__restrict gradient, float *__restrict mean, int64_t count,
          float factor, float keep, float part1, float part2, float rate) {
    for (int64_t i = 0; i < count; i++) {
        float away = gradient[i] * factor - mean[i], direction = mean[i] + away * part1;
        float sign = float(direction > 0.0f) - float(direction < 0.0f);
        mean[i] = mean[i] + away * part2;
        value[i] = value[i] * keep - sign * rate;
    }
}

void nadam(float *__restrict value, const float *__restrict gradient, float *__restrict first, float *__restrict second,
           int64_t count, float factor, float keep, float decay, bool coupled, float part1, float beta2, float part2,
           float slope, float size, float correction, float eps) {
    for (int64_t i = 0; i < count; i++) {
        float grad = gradient[i] * factor, old = value[i] * keep;
        grad = coupled ? grad + value[i] * decay : grad;
        float mean = first[i] + (grad - first[i]) * part1;
        float square = second[i] * beta2 + grad * grad * part2;
        float below = std::sqrt(square / correction) + eps;
        first[i] = mean;
        second[i] = square;
        value[i] = old - slope * (grad / below) - size * (mean / below);
    }
}

}  // namespace

extern "C" {

void halfstep_adam(const Adam *given, const int64_t *columns) {
    const Job &job = given->job;
    if (*job.bad) return;
    Parameters parameters = rows(columns, job.tensors);
    double lr = learning_rate(job), beta1 = given->beta1, beta2 = given->beta2, weight_decay = given->weight_decay;
    std::vector<float> size(job.tensors), root(job.tensors);
    float last = -1.0f;
    for (int64_t n = 0; n < job.tensors; n++) {
        float count = *parameters[n].counters[0] += 1.0f;
        bool same = n > 0 && count == last;  // as a rule: then the powers are those before
        size[n] = same ? size[n - 1] : float(lr / (1 - std::pow(beta1, double(count))));
        root[n] = same ? root[n - 1] : float(std::pow(1 - std::pow(beta2, double(count)), 0.5));
        last = count;
    }
    bool decoupled = given->decoupled != 0, coupled = !decoupled && weight_decay != 0;
    float factor = signed_factor(*given), keep = decoupled ? float(1 - lr * weight_decay) : 1.0f;
    auto rule = [&](int64_t n, float *value, const float *gradient, float *first, float *second, int64_t count) {
        adam(value, gradient, first, second, count, factor, keep, float(weight_decay), coupled, float(1 - beta1),
             float(beta2), float(1 - beta2), size[n], root[n], float(given->eps));
    };
    update(job, parameters, rule);
}

void halfstep_sgd(const Sgd *given, const int64_t *columns) {
    const Job &job = given->job;
    if (*job.bad) return;
    Parameters parameters = rows(columns, job.tensors);
    float factor = signed_factor(*given), rate = float(learning_rate(job)), decay = float(given->weight_decay);
    bool coupled = given->weight_decay != 0, nesterov = given->nesterov != 0;
    update(job, parameters, [&](int64_t n, float *value, const float *gradient, float *mean, float *, int64_t count) {
        sgd(value, gradient, mean, count, factor, decay, coupled, parameters[n].first, float(given->momentum), nesterov,
            rate);
    });
}

void halfstep_lion(const Lion *given, const int64_t *columns) {
    const Job &job = given->job;
    if (*job.bad) return;
    Parameters parameters = rows(columns, job.tensors);
    double lr = learning_rate(job);
    float factor = signed_factor(*given), keep = float(1 - lr * given->weight_decay);
    update(job, parameters, [&](int64_t, float *value, const float *gradient, float *mean, float *, int64_t count) {
        lion(value, gradient, mean, count, factor, keep, float(1 - given->beta1), float(1 - given->beta2), float(lr));
    });
}

void halfstep_nadam(const NAdam *given, const int64_t *columns) {
    const Job &job = given->job;
    if (*job.bad) return;
    Parameters parameters = rows(columns, job.tensors);
    double lr = learning_rate(job), beta1 = given->beta1, weight_decay = given->weight_decay;
    std::vector<float> slope(job.tensors), size(job.tensors), correction(job.tensors);
    for (int64_t n = 0; n < job.tensors; n++) {
        double count = *parameters[n].counters[0] += 1.0f;
        double momentum = beta1 * (1.0 - 0.5 * std::pow(0.96, count * given->momentum_decay));
        double following = beta1 * (1.0 - 0.5 * std::pow(0.96, (count + 1) * given->momentum_decay));
        double passed = *parameters[n].counters[1] *= float(momentum);
        slope[n] = float(lr * (1.0 - momentum) / (1.0 - passed));
        size[n] = float(lr * following / (1.0 - passed * following));
        correction[n] = float(1 - std::pow(given->beta2, count));
    }
    bool decoupled = given->decoupled != 0, coupled = !decoupled && weight_decay != 0;
    float factor = signed_factor(*given), keep = decoupled ? float(1 - lr * weight_decay) : 1.0f;
    auto rule = [&](int64_t n, float *value, const float *gradient, float *first, float *second, int64_t count) {
        nadam(value, gradient, first, second, count, factor, keep, float(weight_decay), coupled, float(1 - beta1),
              float(given->beta2), float(1 - given->beta2), slope[n], size[n], correction[n], float(given->eps));
    };
    update(job, parameters, rule);
}

}  // extern "C"
