/* The k largest magnitudes of blocks of 4096 floats, as `topk.py` defines them: positions ascending,
 * ties to the lower position, NaN the largest. C99 without a library; `native.py` compiles it.
 *
 * Magnitudes are compared as integers: of floats without their sign bit that is the same order.
 *
 * 1. The maxima of 256 groups, each of 16 rows of one of the 64 columns.
 * 2. At least k elements reach the k-th largest maximum. It is found bit by bit, by counting, and
 *    rounded down: all that matters is that few elements reach it.
 * 3. Those are gathered. The k-th largest of them is found in the same way, to the last bit.
 */
#include <stdint.h>

enum { BLOCK = 4096, COLUMNS = 64, ROWS = 16, GROUPS = BLOCK / ROWS, LANES = 16 };
enum { MAGNITUDE = 0x7fffffff, SIGN_BIT = 31, COARSE = 12 };

static int reaching(const int32_t *value, int count, int32_t least) {
    int found = 0;
    for (int i = 0; i < count; i++) found += value[i] >= least;
    return found;
}

/* The k-th largest of values from 0 on, with the bits below `lowest` cut off. */
static int32_t kth_largest(const int32_t *value, int count, int k, int lowest) {
    int32_t found = 0;
    for (int bit = SIGN_BIT - 1; bit >= lowest; bit--) {
        int32_t more = found | (int32_t)1 << bit;
        if (reaching(value, count, more) >= k) found = more;
    }
    return found;
}

static void maxima(const int32_t *block, int32_t *out) {
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
static int gather(const int32_t *block, int32_t least, int32_t *value, int16_t *place) {
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

static void one_block(const int32_t *block, int k, int64_t *out) {
    int32_t groups[GROUPS], value[BLOCK];
    int16_t place[BLOCK];
    maxima(block, groups);
    int count = gather(block, kth_largest(groups, GROUPS, k, COARSE), value, place);
    int32_t last = kth_largest(value, count, k, 0);
    int tied = k - (last < MAGNITUDE ? reaching(value, count, last + 1) : 0);
    for (int i = 0, n = 0; i < count && n < k; i++)
        if (value[i] > last || (value[i] == last && tied-- > 0)) out[n++] = place[i];
}

/* Of `blocks` blocks, which lie one after the other, k positions each (1 <= k <= 256). */
void fsdp_demo_top_k(const int32_t *block, int64_t blocks, int64_t k, int64_t *out) {
    for (int64_t b = 0; b < blocks; b++) one_block(block + b * BLOCK, (int)k, out + b * k);
}
