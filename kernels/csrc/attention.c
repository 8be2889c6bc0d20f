/* Causal attention over keys and values in pages.
 *
 * A task is a run of queries of one sequence with all heads that read one KV head. It goes over the
 * context three times: scores of all keys, their weights, the weighted sum of values. A score is
 * summed over D in order, values over the keys in order, weights as floats.h says; each query by
 * itself, from the first key of its sequence on. So nothing else can change a bit.
 *
 * Pages of floats are multiplied where they are. Others are widened for it, a chunk of keys at a
 * time, which then serves all queries of the task. */

#include <stdatomic.h>
#include <string.h>

#include "isa.h"
#include "pages.h"
#include "scratch.h"
#include "threads.h"

enum {
    CHUNK = 64,             /* keys */
    MOST_ROWS = 96,         /* of a task: a row is one query of one head */
    SCORE_FLOATS = 1 << 16, /* of a task, if that leaves a tile of rows */
};

struct attention {
    const struct isa *isa;
    const struct megabit_pages *pages;
    const char *q;
    char *out;
    int type;
    int64_t heads, sequences, most_blocks;
    const int32_t *block_tables, *query_starts, *context_lengths;
    float scale;
    float *statistics; /* [tokens, heads, 2], or NULL */
    int64_t padded;    /* D in whole words */
    bool is_direct;
    int64_t *group_starts; /* [kv_heads + 1] */
    int64_t *group_heads;  /* [heads], by KV head */
    int64_t *first_tasks;  /* [sequences + 1] */
    _Atomic int out_of_memory;
};

/* Where a task is. */
struct rows {
    const struct attention *a;
    const int32_t *table;
    int64_t kv_head, group; /* heads of the group */
    int64_t first, count;   /* rows, counted from the first query of the sequence */
    int64_t before;         /* tokens before that query */
    int64_t context;        /* keys that the last row sees */
    int64_t stride;         /* of scores */
    float *q, *scores, *out, *sums;
    float *chunk; /* widened; lanes beyond D hold anything, and no lane reads another */
};

/* Keys that a row of the task sees. */
static int64_t visible(const struct rows *rows, int64_t row)
{
    return rows->before + (rows->first + row) / rows->group + 1;
}

static int64_t task_rows(const struct attention *a, int64_t sequence)
{
    int64_t stride = ceil_div(a->context_lengths[sequence], CHUNK) * CHUNK;
    int64_t tile = a->isa->floats.row_tile, rows = SCORE_FLOATS / (stride > 0 ? stride : 1);
    rows = smaller(rows, MOST_ROWS) / tile * tile;
    return rows > tile ? rows : tile;
}

/* The page of this KV head that holds a key, as a number of keys [D][block], values [block][D]. */
static int64_t page_of(const struct rows *rows, int64_t key)
{
    const struct megabit_pages *pages = rows->a->pages;
    return rows->table[key / pages->block_size] * pages->kv_heads + rows->kv_head;
}

/* Pointers to the words of keys from `first` on, widened if need be; returns their stride. */
static int64_t keys_of(const struct rows *rows, int64_t first, int64_t words, const float **at)
{
    const struct attention *a = rows->a;
    const struct megabit_pages *pages = a->pages;
    const int64_t block = pages->block_size, d = pages->head_dim, bytes = type_bytes(pages->type);
    if (a->is_direct) {
        for (int64_t word = 0; word < words; word++) {
            int64_t key = first + WORD * word;
            at[word] = (const float *)pages->keys + page_of(rows, key) * block * d + key % block;
        }
        return block;
    }
    int64_t last = smaller(first + CHUNK, rows->context);
    for (int64_t key = first, next; key < last; key = next) {
        next = smaller(last, (key / block + 1) * block);
        int64_t page = page_of(rows, key), offset = key % block, count = next - key;
        float *out = rows->chunk + (key - first);
        const char *from = (const char *)pages->keys + bytes * (page * block * d + offset);
        a->isa->floats.widen_rows(from, pages->type, block, d, count, out, CHUNK);
        if (pages->key_scale != NULL)
            for (int64_t i = 0; i < d; i++)
                a->isa->floats.scale_row(out + CHUNK * i, pages->key_scale + page * block + offset,
                                         count);
    }
    for (int64_t word = 0; word < words; word++)
        at[word] = rows->chunk + WORD * word;
    return CHUNK;
}

/* Values of keys from `first` on, within one page or one chunk: how many, and where. */
static int64_t values_of(const struct rows *rows, int64_t first, const float **at)
{
    const struct attention *a = rows->a;
    const struct megabit_pages *pages = a->pages;
    const int64_t block = pages->block_size, d = pages->head_dim, bytes = type_bytes(pages->type);
    if (a->is_direct) {
        *at = (const float *)pages->values + (page_of(rows, first) * block + first % block) * d;
        return smaller(block - first % block, rows->context - first);
    }
    int64_t last = smaller(first + CHUNK, rows->context);
    for (int64_t key = first, next; key < last; key = next) {
        next = smaller(last, (key / block + 1) * block);
        int64_t place = page_of(rows, key) * block + key % block;
        float *out = rows->chunk + (key - first) * a->padded;
        const char *from = (const char *)pages->values + bytes * place * d;
        a->isa->floats.widen_rows(from, pages->type, d, next - key, d, out, a->padded);
        if (pages->value_scale != NULL)
            for (int64_t i = 0; i < next - key; i++)
                for (int64_t j = 0; j < d; j++)
                    out[a->padded * i + j] *= pages->value_scale[place + i];
    }
    *at = rows->chunk;
    return last - first;
}

static void score(const struct rows *rows)
{
    const struct attention *a = rows->a;
    const int64_t tile = a->isa->floats.row_tile, d = a->pages->head_dim;
    const float *at[CHUNK / WORD];
    memset(rows->scores, 0, sizeof(float) * (size_t)(rows->count * rows->stride));
    for (int64_t first = 0; first < rows->context; first += CHUNK) {
        int64_t words = ceil_div(smaller(CHUNK, rows->context - first), WORD);
        int64_t stride = keys_of(rows, first, words, at);
        for (int64_t row = 0; row < rows->count; row += tile) {
            int64_t next = smaller(row + tile, rows->count);
            int64_t seen = ceil_div(visible(rows, next - 1) - first, WORD);
            if (seen > 0)
                a->isa->floats.outer_tile((int)(next - row), smaller(seen, words),
                                          rows->q + row * d, d, at, stride, d,
                                          rows->scores + row * rows->stride + first, rows->stride);
        }
    }
}

/* Some rows with the values of keys first <= key < last. */
static void add_values(const struct rows *rows, int64_t row, int64_t count, int64_t first,
                       int64_t last, const float *values)
{
    enum { WORDS = 8 };
    const int64_t padded = rows->a->padded;
    const float *at[WORDS];
    for (int64_t word = 0; word < padded / WORD; word += WORDS) {
        int64_t words = smaller(WORDS, padded / WORD - word);
        for (int64_t i = 0; i < words; i++)
            at[i] = values + WORD * (word + i);
        rows->a->isa->floats.outer_tile(
            (int)count, words, rows->scores + row * rows->stride + first, rows->stride, at, padded,
            last - first, rows->out + row * padded + WORD * word, padded);
    }
}

static void sum_values(const struct rows *rows)
{
    const int64_t tile = rows->a->isa->floats.row_tile, padded = rows->a->padded;
    const float *values;
    memset(rows->out, 0, sizeof(float) * (size_t)(rows->count * padded));
    for (int64_t first = 0, last; first < rows->context; first = last) {
        last = first + values_of(rows, first, &values);
        for (int64_t row = 0; row < rows->count; row += tile) {
            int64_t next = smaller(row + tile, rows->count);
            /* What all rows see; then what later ones see besides. */
            int64_t common = smaller(last, visible(rows, row));
            if (common > first)
                add_values(rows, row, next - row, first, common, values);
            common = common > first ? common : first;
            for (int64_t i = row; i < next && common < last; i++) {
                int64_t seen = smaller(last, visible(rows, i));
                if (seen > common)
                    add_values(rows, i, 1, common, seen, values + (common - first) * padded);
            }
        }
    }
}

/* Element of q and out at which a row of the task begins. */
static int64_t place_of(const struct rows *rows, int64_t sequence, int64_t row)
{
    const struct attention *a = rows->a;
    int64_t token = a->query_starts[sequence] + (rows->first + row) / rows->group;
    int64_t head =
        a->group_heads[a->group_starts[rows->kv_head] + (rows->first + row) % rows->group];
    return (token * a->heads + head) * a->pages->head_dim;
}

static void attend(struct rows *rows, int64_t sequence)
{
    const struct attention *a = rows->a;
    const struct float_kernels *floats = &a->isa->floats;
    const int64_t d = a->pages->head_dim, bytes = type_bytes(a->type);
    for (int64_t row = 0; row < rows->count; row++)
        floats->widen_rows(a->q + bytes * place_of(rows, sequence, row), a->type, 0, 1, d,
                           rows->q + row * d, 0);
    score(rows);
    for (int64_t row = 0; row < rows->count; row++) {
        float largest, sum = floats->softmax_row(rows->scores + row * rows->stride,
                                                 visible(rows, row), a->scale, &largest);
        rows->sums[row] = sum;
        if (a->statistics != NULL) {
            float *statistics = a->statistics + place_of(rows, sequence, row) / d * 2;
            statistics[0] = largest;
            statistics[1] = sum;
        }
    }
    sum_values(rows);
    for (int64_t row = 0; row < rows->count; row++)
        floats->narrow_row(rows->out + row * a->padded, rows->sums[row], d, a->type,
                           a->out + bytes * place_of(rows, sequence, row));
}

static void attend_tasks(void *context, int64_t begin, int64_t end)
{
    struct attention *a = context;
    const int64_t d = a->pages->head_dim;
    int64_t sequence = 0;
    for (int64_t task = begin; task < end; task++) {
        while (task >= a->first_tasks[sequence + 1])
            sequence++;
        int64_t kv_heads = a->pages->kv_heads, most = task_rows(a, sequence);
        int64_t queries = a->query_starts[sequence + 1] - a->query_starts[sequence];
        int64_t own = task - a->first_tasks[sequence];
        struct rows rows = {
            .a = a,
            .table = a->block_tables + sequence * a->most_blocks,
            .kv_head = own % kv_heads,
            .first = own / kv_heads * most,
            .before = a->context_lengths[sequence] - queries,
        };
        rows.group = a->group_starts[rows.kv_head + 1] - a->group_starts[rows.kv_head];
        rows.count = smaller(most, queries * rows.group - rows.first);
        if (rows.count <= 0)
            continue; /* another KV head has more heads */
        rows.context = visible(&rows, rows.count - 1);
        rows.stride = ceil_div(rows.context, CHUNK) * CHUNK;
        int64_t d_words = WORD * ceil_div(d, WORD);
        size_t q = (size_t)ceil_div(rows.count * d, WORD) * WORD,
               scores = (size_t)(rows.count * rows.stride), out = (size_t)(rows.count * a->padded),
               sums = (size_t)ceil_div(rows.count, WORD) * WORD, chunk = (size_t)(CHUNK * d_words);
        rows.q = scratch(SCRATCH_SUMS, sizeof(float) * (q + scores + out + sums + chunk));
        if (rows.q == NULL) {
            atomic_store(&a->out_of_memory, 1);
            return;
        }
        rows.scores = rows.q + q;
        rows.out = rows.scores + scores;
        rows.sums = rows.out + out;
        rows.chunk = rows.sums + sums;
        attend(&rows, sequence);
    }
}

/* Whether nothing outside of what there is would be read or written. */
static bool is_valid(const struct attention *a, const int32_t *kv_of_query, int64_t tokens)
{
    const struct megabit_pages *pages = a->pages;
    bool valid = a->query_starts[0] == 0 && a->query_starts[a->sequences] == tokens;
    for (int64_t head = 0; head < a->heads; head++)
        valid &= kv_of_query[head] >= 0 && kv_of_query[head] < pages->kv_heads;
    for (int64_t i = 0; i < a->sequences && valid; i++) {
        int64_t queries = (int64_t)a->query_starts[i + 1] - a->query_starts[i];
        int64_t blocks = ceil_div(a->context_lengths[i], pages->block_size);
        valid &= queries >= 0 && queries <= a->context_lengths[i] && blocks <= a->most_blocks;
        const int32_t *table = a->block_tables + i * a->most_blocks;
        for (int64_t block = 0; valid && block < blocks; block++)
            valid &= table[block] >= 0 && table[block] < pages->blocks;
    }
    return valid;
}

/* Heads by KV head, and the first task of each sequence; the work of all is returned. */
static double plan(struct attention *a, const int32_t *kv_of_query)
{
    int64_t kv_heads = a->pages->kv_heads, most_group = 0, count = 0;
    for (int64_t kv = 0; kv < kv_heads; kv++) {
        a->group_starts[kv] = count;
        for (int64_t head = 0; head < a->heads; head++)
            if (kv_of_query[head] == kv)
                a->group_heads[count++] = head;
        if (count - a->group_starts[kv] > most_group)
            most_group = count - a->group_starts[kv];
    }
    a->group_starts[kv_heads] = count;
    double work = 0;
    int64_t tasks = 0;
    for (int64_t i = 0; i < a->sequences; i++) {
        int64_t queries = a->query_starts[i + 1] - a->query_starts[i];
        a->first_tasks[i] = tasks;
        tasks += ceil_div(queries * most_group, task_rows(a, i)) * kv_heads;
        work += (double)queries * (double)a->context_lengths[i];
    }
    a->first_tasks[a->sequences] = tasks;
    return work * (double)a->heads * 2 * (double)a->pages->head_dim;
}

int megabit_paged_attention(const struct isa *isa, const void *q, int type,
                            const struct megabit_pages *pages, const int32_t *kv_of_query,
                            int64_t tokens, int64_t heads, const int32_t *block_tables,
                            int64_t most_blocks, const int32_t *query_starts,
                            const int32_t *context_lengths, int64_t sequences, float scale,
                            void *out, float *statistics, int threads)
{
    struct attention a = {
        .isa = isa,
        .pages = pages,
        .q = q,
        .out = out,
        .type = type,
        .heads = heads,
        .sequences = sequences,
        .most_blocks = most_blocks,
        .block_tables = block_tables,
        .query_starts = query_starts,
        .context_lengths = context_lengths,
        .scale = scale,
        .statistics = statistics,
        .padded = ceil_div(pages->head_dim, WORD) * WORD,
        .is_direct = pages->type == MEGABIT_FLOAT32 && pages->block_size % WORD == 0 &&
                     pages->head_dim % WORD == 0,
    };
    if (!is_valid(&a, kv_of_query, tokens))
        return MEGABIT_BAD_VALUE;
    a.group_starts =
        scratch(SCRATCH_ACTIVATIONS,
                sizeof(int64_t) * (size_t)(pages->kv_heads + 1 + heads + sequences + 1));
    if (a.group_starts == NULL)
        return MEGABIT_NO_MEMORY;
    a.group_heads = a.group_starts + pages->kv_heads + 1;
    a.first_tasks = a.group_heads + heads;
    double work = plan(&a, kv_of_query);
    parallel_for(a.first_tasks[sequences], threads_for(work, threads), attend_tasks, &a);
    return a.out_of_memory ? MEGABIT_NO_MEMORY : MEGABIT_OK;
}
