/* The loops for which torch takes twice as long or more. An extension module that the build may leave
 * out: without it torch finds the same.
 *
 * `add_up`: the sums of rows and columns for the checksum of `peers/header.py`.
 *
 * `mean`: the mean of vectors of floats, for `peers/collectives.py`.
 *
 * `top_k`: the k largest magnitudes of blocks of 4096 floats, as `selection.py` defines them:
 * positions ascending, ties to the lower position, NaN the largest.
 *
 * Magnitudes are compared as integers: of floats without their sign bit that is the same order.
 *
 * 1. The maxima of 256 groups, each of 16 rows of one of the 64 columns.
 * 2. At least k elements reach the k-th largest maximum. It is found bit by bit, by counting, and
 *    rounded down: all that matters is that few elements reach it.
 * 3. Those are gathered. The k-th largest of them is found in the same way, to the last bit.
 *
 * The code is made for several instruction sets, of which the loader takes what the processor knows:
 * an environment may be shared by unlike machines.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && __GNUC__ >= 11 && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#if defined(__GNUC__)
#define INSIDE static inline __attribute__((always_inline))  /* else it is made for one set only */
#else
#define INSIDE static inline
#endif

enum { BLOCK = 4096, COLUMNS = 64, ROWS = 16, GROUPS = BLOCK / ROWS, LANES = 16 };
enum { MAGNITUDE = 0x7fffffff, SIGN_BIT = 31, COARSE = 12 };
enum { WORDS = 2048, STRETCH = 1024 };
enum { AT_ONCE = 2 };  /* rows: at -O2 gcc makes no vector instructions of a loop over more */

INSIDE int reaching(const int32_t *value, int count, int32_t least) {
    int found = 0;
    for (int i = 0; i < count; i++) found += value[i] >= least;
    return found;
}

/* The k-th largest of values from 0 on, with the bits below `lowest` cut off. */
INSIDE int32_t kth_largest(const int32_t *value, int count, int k, int lowest) {
    int32_t found = 0;
    for (int bit = SIGN_BIT - 1; bit >= lowest; bit--) {
        int32_t more = found | (int32_t)1 << bit;
        if (reaching(value, count, more) >= k) found = more;
    }
    return found;
}

INSIDE void maxima(const int32_t *block, int32_t *out) {
    for (int g = 0; g < GROUPS; g += LANES) {
        const int32_t *from = block + g / COLUMNS * ROWS * COLUMNS + g % COLUMNS;
        int32_t most[LANES] = {0};
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < LANES; i++) {
                int32_t m = from[row * COLUMNS + i] & MAGNITUDE;
                most[i] = m > most[i] ? m : most[i];
            }
        for (int i = 0; i < LANES; i++) out[g + i] = most[i];
    }
}

/* What reaches `least`: magnitudes and positions, ascending. */
INSIDE int gather(const int32_t *block, int32_t least, int32_t *value, int16_t *place) {
    int count = 0;
    for (int at = 0; at < BLOCK; at += LANES) {
        uint32_t hits = 0;
        for (int i = 0; i < LANES; i++)
            hits |= (uint32_t)((block[at + i] & MAGNITUDE) >= least) << i;
        for (; hits; hits &= hits - 1) {
            int here = at + __builtin_ctz(hits);
            value[count] = block[here] & MAGNITUDE;
            place[count++] = (int16_t)here;
        }
    }
    return count;
}

INSIDE void one_block(const int32_t *block, int k, int64_t *out) {
    int32_t groups[GROUPS], value[BLOCK];
    int16_t place[BLOCK];
    maxima(block, groups);
    int count = gather(block, kth_largest(groups, GROUPS, k, COARSE), value, place);
    int32_t last = kth_largest(value, count, k, 0);
    int tied = k - (last < MAGNITUDE ? reaching(value, count, last + 1) : 0);
    for (int i = 0, n = 0; i < count && n < k; i++)
        if (value[i] > last || (value[i] == last && tied-- > 0)) out[n++] = place[i];
}

FOR_EACH_PROCESSOR
static void all_blocks(const int32_t *block, long long blocks, int k, int64_t *out) {
    for (long long b = 0; b < blocks; b++) one_block(block + b * BLOCK, k, out + b * k);
}

static PyObject *top_k(PyObject *module, PyObject *args) {
    unsigned long long block, out;
    long long blocks;
    int k;
    (void)module;
    if (!PyArg_ParseTuple(args, "KLiK", &block, &blocks, &k, &out)) return NULL;
    if (k < 1 || k > GROUPS) return PyErr_Format(PyExc_ValueError, "k=%d: allowed are 1 to 256", k);
    Py_BEGIN_ALLOW_THREADS
    all_blocks((const int32_t *)(uintptr_t)block, blocks, k, (int64_t *)(uintptr_t)out);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Add words of 8 bytes, wherever they begin, to the sums of their columns, and set those of rows. */
INSIDE void some_rows(const char *rows, int count, uint64_t *columns, uint64_t *sums) {
    uint64_t sum[AT_ONCE] = {0};
    for (int i = 0; i < WORDS; i++)
        for (int j = 0; j < count; j++) {
            uint64_t word;
            memcpy(&word, rows + 8 * (j * WORDS + i), 8);
            columns[i] += word;
            sum[j] += word;
        }
    for (int j = 0; j < count; j++) sums[j] = sum[j];
}

FOR_EACH_PROCESSOR
static void all_rows(const char *rows, long long count, uint64_t *columns) {
    uint64_t *sums = columns + WORDS;
    long long at = 0;
    for (; at + AT_ONCE <= count; at += AT_ONCE)
        some_rows(rows + 8 * WORDS * at, AT_ONCE, columns, sums + at);
    for (; at < count; at++) some_rows(rows + 8 * WORDS * at, 1, columns, sums + at);
}

static PyObject *add_up(PyObject *module, PyObject *args) {
    unsigned long long rows, sums;
    long long count;
    (void)module;
    if (!PyArg_ParseTuple(args, "KLK", &rows, &count, &sums)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    all_rows((const char *)(uintptr_t)rows, count, (uint64_t *)(uintptr_t)sums);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

FOR_EACH_PROCESSOR
static void mean_of(const uint64_t *vectors, int size, long long n, float *out) {
    for (long long lo = 0; lo < n; lo += STRETCH) {
        int many = n - lo < STRETCH ? (int)(n - lo) : STRETCH;
        float sum[STRETCH] = {0};
        for (int j = 0; j < size; j++) {
            const float *vector = (const float *)(uintptr_t)vectors[j] + lo;
            for (int i = 0; i < many; i++) sum[i] += vector[i];
        }
        for (int i = 0; i < many; i++) out[lo + i] = sum[i] / (float)size;
    }
}

static PyObject *mean(PyObject *module, PyObject *args) {
    const char *vectors;
    Py_ssize_t bytes;
    unsigned long long out;
    long long n;
    (void)module;
    if (!PyArg_ParseTuple(args, "y#LK", &vectors, &bytes, &n, &out)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    mean_of((const uint64_t *)vectors, (int)(bytes / 8), n, (float *)(uintptr_t)out);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"add_up", add_up, METH_VARARGS,
     "add_up(rows, count, sums): add the sums modulo 2^64 of the columns of `count` rows of 2048 words\n"
     "at the address `rows` to the first 2048 words at `sums`; those of the rows come behind them."},
    {"mean", mean, METH_VARARGS,
     "mean(vectors, n, out): the sums from 0 on, in order, of vectors of n floats over their number, at\n"
     "the address `out`, which may be that of one of them. vectors: their addresses, 8 bytes each."},
    {"top_k", top_k, METH_VARARGS,
     "top_k(block, blocks, k, out): positions of the k largest (1 to 256) of each of `blocks` blocks\n"
     "of 4096 floats that lie one after the other at the address `block`, int64 [blocks, k] at `out`."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef MODULE = {.m_base = PyModuleDef_HEAD_INIT, .m_name = "_kernels", .m_size = -1,
                                    .m_methods = METHODS};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&MODULE); }
