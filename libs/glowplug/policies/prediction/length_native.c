/* What length_text.py and length_model.py compute of ASCII texts, in a tenth of the time: words and their hashes, the
 * heads and the trees. Those two say what the numbers mean; a property test holds this against them.
 *
 * No allocation, no Python: whoever calls owns the memory. Not for several threads at once, as a context is written. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define MAX_HEADS 16
#define MAX_STEMS 512
#define MAX_NUMBERS 128
#define SET_SIZE 8192 /* a power of two; a text of 1,303 characters has at most 1,303 words, each of three hashes */

typedef struct {
    /* of the model */
    const int8_t *weights; /* [buckets][heads] */
    const float *scale, *bias;
    const uint8_t *feature;
    const float *limit, *value;
    const int32_t *next; /* two of each node: at most the limit, above it; a leaf is its own successor */
    const int32_t *roots;
    int32_t num_heads, num_roots, num_numbers;
    uint32_t bucket_mask;
    /* of the texts */
    const uint64_t *stems;     /* sorted; the first letters of a word, the first one lowest */
    const uint32_t *stem_kinds; /* bits */
    const uint64_t *spelled;   /* sorted; whole words */
    const int32_t *spelled_values;
    int32_t num_stems, num_spelled, stem_letters, num_edge_words;
    uint32_t text_seed, begin_seed, end_seed, first_mark;
    /* written */
    int32_t sums[2][MAX_HEADS]; /* of the text to be answered, and of those around it */
    int32_t num_hashes[2];
    uint32_t stamp;
    uint32_t stamps[SET_SIZE], members[SET_SIZE];
} Context;

typedef struct {
    int32_t num_words, num_unique, spelled;
    int32_t kinds[32];
} Scanned;

static uint32_t crc_table[256];

static void make_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
        crc_table[i] = c;
    }
}

static uint32_t crc32_of(const uint8_t *data, int length, uint32_t seed) {
    uint32_t c = ~seed;
    for (int i = 0; i < length; i++) c = crc_table[(c ^ data[i]) & 255] ^ (c >> 8);
    return ~c;
}

static void add(Context *self, int which, uint32_t hash) {
    uint32_t bucket = hash & self->bucket_mask, at = (bucket * 2654435761u) >> 19;
    while (self->stamps[at] == self->stamp) {
        if (self->members[at] == bucket) return;
        at = (at + 1) & (SET_SIZE - 1);
    }
    self->stamps[at] = self->stamp;
    self->members[at] = bucket;
    self->num_hashes[which]++;
    const int8_t *row = self->weights + (size_t)bucket * self->num_heads;
    for (int h = 0; h < self->num_heads; h++) self->sums[which][h] += row[h];
}

static int is_letter(uint8_t c) { return c >= 'a' && c <= 'z'; }
static int is_alnum(uint8_t c) { return is_letter(c) || (c >= '0' && c <= '9'); }

/* The next word or sign from `*at` on. Returns its length, 0 at the end, and moves `*at` to its beginning. */
static int next_word(const uint8_t *text, int length, int *at) {
    int i = *at;
    for (; i < length; i++) {
        uint8_t c = text[i];
        if (is_alnum(c)) {
            int end = i + 1;
            while (end < length && is_alnum(text[end])) end++;
            if (end + 1 < length && text[end] == '\'' && is_letter(text[end + 1])) {
                end += 2;
                while (end < length && is_letter(text[end])) end++;
            }
            *at = i;
            return end - i;
        }
        if (c == '_' || c == ' ' || (c >= '\t' && c <= '\r') || (c >= 'A' && c <= 'Z')) continue;
        *at = i;
        return 1;
    }
    *at = i;
    return 0;
}

static int find(const uint64_t *sorted, int num, uint64_t wanted) {
    int low = 0, high = num;
    while (low < high) {
        int middle = (low + high) / 2;
        if (sorted[middle] < wanted) low = middle + 1;
        else high = middle;
    }
    return low < num && sorted[low] == wanted ? low : -1;
}

static uint64_t packed(const uint8_t *word, int length) {
    uint64_t made = 0;
    for (int i = 0; i < length; i++) made |= (uint64_t)word[i] << (8 * i);
    return made;
}

typedef struct {
    int32_t at, length;
    uint32_t hash;
} Word;

static void edge(const Context *self, const uint8_t *text, Word word, uint8_t *seen, Scanned *out) {
    int length = word.length < self->stem_letters ? word.length : self->stem_letters;
    int stem = find(self->stems, self->num_stems, packed(text + word.at, length));
    if (stem >= 0 && !seen[stem]) {
        seen[stem] = 1;
        for (int kind = 0; kind < 32; kind++) out->kinds[kind] += self->stem_kinds[stem] >> kind & 1;
    }
    if (word.length > 8) return;
    int spelled = find(self->spelled, self->num_spelled, packed(text + word.at, word.length));
    if (spelled >= 0 && self->spelled_values[spelled] > out->spelled) out->spelled = self->spelled_values[spelled];
}

/* Of the whole text to be answered: newlines, fences (```), question marks, spaces, quotes, empty lines. */
void count_signs(const uint8_t *text, int32_t length, int32_t *out) {
    int32_t newlines = 0, questions = 0, spaces = 0, quotes = 0, ticks = 0, fences = 0, paragraphs = 0;
    for (int32_t i = 0; i < length; i++) {
        newlines += text[i] == '\n';
        questions += text[i] == '?';
        spaces += text[i] == ' ';
        quotes += text[i] == '"';
        ticks += text[i] == '`';
    }
    for (int32_t i = 0; ticks > 2 && i + 2 < length; i++)
        if (text[i] == '`' && text[i + 1] == '`' && text[i + 2] == '`') {
            fences++;
            i += 2;
        }
    for (int32_t i = 0; newlines > 1 && i + 1 < length; i++)
        if (text[i] == '\n' && text[i + 1] == '\n') {
            paragraphs++;
            i++;
        }
    int32_t found[] = {newlines, fences, questions, spaces, quotes, paragraphs};
    memcpy(out, found, sizeof found);
}

/* The text to be answered, in small letters, at most `SET_SIZE / 4` bytes of it. `is_first`: no answer came before. */
void scan(Context *self, const uint8_t *text, int32_t length, int32_t is_first, Scanned *out) {
    static Word words[SET_SIZE / 4];
    static int32_t by_hash[SET_SIZE];
    uint8_t seen[MAX_STEMS] = {0};
    memset(out, 0, sizeof *out);
    memset(by_hash, 0, sizeof by_hash);
    memset(self->sums, 0, sizeof self->sums);
    self->num_hashes[0] = self->num_hashes[1] = 0;
    if (!crc_table[1]) make_table();
    self->stamp++;
    int num = 0, at = 0, size;
    while ((size = next_word(text, length, &at))) {
        Word word = {at, size, crc32_of(text + at, size, self->text_seed)};
        int slot = word.hash >> 19;
        while (by_hash[slot]) {
            Word other = words[by_hash[slot] - 1];
            if (other.hash == word.hash && other.length == size && !memcmp(text + other.at, text + at, size)) break;
            slot = (slot + 1) & (SET_SIZE - 1);
        }
        words[num++] = word;
        if (!by_hash[slot]) {
            by_hash[slot] = num;
            out->num_unique++;
        }
        add(self, 0, word.hash);
        if (is_first) add(self, 0, (word.hash & self->bucket_mask) ^ self->first_mark);
        if (num > 1) {
            uint32_t before = words[num - 2].hash & self->bucket_mask;
            add(self, 0, before * 31 + (word.hash & self->bucket_mask) * 17);
        }
        at += size;
    }
    out->num_words = num;
    for (int i = 0; i < num && i < 3; i++) add(self, 0, crc32_of(text + words[i].at, words[i].length, self->begin_seed));
    for (int i = num > 3 ? num - 3 : 0; i < num; i++)
        add(self, 0, crc32_of(text + words[i].at, words[i].length, self->end_seed));
    if (num >= 3) {
        uint32_t hash = 0;
        for (int i = 0; i < 3; i++) {
            if (i) hash = crc32_of((const uint8_t *)" ", 1, hash);
            hash = crc32_of(text + words[i].at, words[i].length, hash);
        }
        add(self, 0, hash);
    }
    int edges = self->num_edge_words;
    for (int i = 0; i < num; i++)
        if (num <= 2 * edges || i < edges || i >= num - edges) edge(self, text, words[i], seen, out);
    self->stamp++; /* what is around has a set of its own */
}

/* A part of a text before, in small letters; after `scan`. */
void around(Context *self, const uint8_t *text, int32_t length, uint32_t seed) {
    int at = 0, size;
    while ((size = next_word(text, length, &at))) {
        add(self, 1, crc32_of(text + at, size, seed));
        at += size;
    }
}

/* The sum of the trees over these numbers and the heads of what was scanned: log(1 + tokens). */
double log_tokens(const Context *self, const double *numbers) {
    float inputs[MAX_NUMBERS + MAX_HEADS];
    for (int i = 0; i < self->num_numbers; i++) inputs[i] = (float)numbers[i];
    for (int h = 0; h < self->num_heads; h++) {
        double sum = 0.0;
        for (int which = 0; which < 2; which++)
            if (self->num_hashes[which]) sum += self->sums[which][h] / sqrt((double)self->num_hashes[which]);
        inputs[self->num_numbers + h] = (float)(sum * self->scale[h] + self->bias[h]);
    }
    double total = 0.0;
    for (int t = 0; t < self->num_roots; t++) {
        int32_t at = self->roots[t], to;
        while ((to = self->next[2 * at + (inputs[self->feature[at]] > self->limit[at])]) != at) at = to;
        total += self->value[at];
    }
    return total;
}
