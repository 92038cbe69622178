// The tail's operators on CPU: what `reference/operators.py` computes, each byte read once and written once. Called by
// `calls.py`; the arguments are those of `ops.py`.
//
// Compiled for a wheel or on the machine it runs on, without torch's headers: tensors come as addresses and sizes.
// Loops are written so that compilers vectorise them: one result an iteration, branches only as selects. Nothing may be
// fused, reordered or flushed to zero (-ffp-contract=off, no -ffast-math): results are `reference/operators.py`'s bit
// for bit, but for those of NaN.
//
// Work goes in pieces of PIECE elements. A piece is widened to fp32 in scratch that stays in the L1 cache, updated
// there and narrowed again; what is fp32 already is updated where it is. So formats do not multiply with optimizers.
//
// Threads are those torch has: the caller hands over the entry of its OpenMP runtime, and none is linked. Thread t of T
// takes the t-th part of all elements of all tensors; only whole pieces, so results do not depend on T.
//
// One unit for the compiler, whatever the number of files: their functions are inlined into each other.

#include "exponents.h"
#include "loss.h"
#include "norms.h"
#include "updates.h"

#if defined(HALFSTEP_PORTABLE) && defined(__GLIBC__)
// The two functions of libm as every glibc has them, not the newest ones (2.29), which older systems lack. The newer
// ones differ in what they do to errno.
#if defined(__x86_64__)
__asm__(".symver log, log@GLIBC_2.2.5\n.symver pow, pow@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver log, log@GLIBC_2.17\n.symver pow, pow@GLIBC_2.17");
#endif
#endif
