/* The yardstick of codecs.py: plain loops. For n a multiple of 128. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define SIZE 0x7FFFFFFFu
#define INFINITE 0x7F800000u

static inline uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
static inline float number_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

int accumulate(const float *restrict r, float *restrict p, long n) {
    uint32_t largest = 0;
    for (long i = 0; i < n; i++) {
        p[i] += r[i];
        uint32_t b = bits_of(p[i]) & SIZE;
        largest = b > largest ? b : largest;
    }
    return largest < INFINITE;
}

/* 16 bits */

int encode_bfloat16(float *restrict r, uint16_t *restrict w, long n) {
    uint32_t largest = 0;
    for (long i = 0; i < n; i++) {
        uint32_t b = bits_of(r[i]), size = b & SIZE;
        largest = size > largest ? size : largest;
        b += 0x8000u;
        if ((b & SIZE) > 0x7F7FFFFFu) b = (b & ~SIZE) | 0x7F7F0000u;
        w[i] = b >> 16;
        r[i] -= number_of(b & 0xFFFF0000u);
    }
    return largest < INFINITE;
}

int add_bfloat16(float *restrict v, const uint16_t *restrict w, long n, long n_words) {
    (void)n_words;
    uint16_t largest = 0;
    for (long i = 0; i < n; i++) {
        uint16_t size = w[i] & 0x7FFF;
        largest = size > largest ? size : largest;
    }
    if (largest > 0x7F7F) return 0;
    for (long i = 0; i < n; i++) v[i] += number_of((uint32_t)w[i] << 16);
    return 1;
}

/* 8 and 4 bits */

static inline int encode_block(float *restrict r, uint16_t *scale, int32_t *restrict q, float last,
                               uint32_t most) {
    uint32_t largest = 0;
    for (int i = 0; i < 64; i++) {
        uint32_t b = bits_of(r[i]) & SIZE;
        largest = b > largest ? b : largest;
    }
    if (largest >= INFINITE) return 0;
    uint32_t b = bits_of(number_of(largest) / (float)((last + 0.5) / 1.0079)) & 0xFFFF0000u;
    b = b > most ? most : b;
    b = b < 0x00800000u ? 0 : b;
    *scale = b >> 16;
    float s = number_of(b), inverse = b ? 1.0f / s : 0.0f;
    for (int i = 0; i < 64; i++) {
        float x = rintf(r[i] * inverse);
        x = x > last ? last : x;
        x = x < -last ? -last : x;
        r[i] -= x * s;
        q[i] = (int32_t)x;
    }
    return 1;
}

static int are_scales(const uint16_t *scales, long n, uint16_t most) {
    int valid = 1;
    for (long k = 0; k < n; k++)
        valid &= scales[k] == 0 || (scales[k] >= 0x80 && scales[k] <= most);
    return valid;
}

int encode_int8(float *restrict r, uint32_t *restrict w, long n) {
    uint16_t *scales = (uint16_t *)w;
    int8_t *codes = (int8_t *)(w + n / 128);
    int32_t q[64];
    for (long k = 0; k < n / 64; k++) {
        if (!encode_block(r + 64 * k, scales + k, q, 127.0f, 0x7B800000u)) return 0;
        for (int i = 0; i < 64; i++) codes[64 * k + i] = (int8_t)q[i];
    }
    return 1;
}

int add_int8(float *restrict v, const uint32_t *restrict w, long n, long n_words) {
    (void)n_words;
    const uint16_t *scales = (const uint16_t *)w;
    const int8_t *codes = (const int8_t *)(w + n / 128);
    if (!are_scales(scales, n / 64, 0x7B80)) return 0;
    for (long k = 0; k < n / 64; k++) {
        float s = number_of((uint32_t)scales[k] << 16);
        for (int i = 0; i < 64; i++) v[64 * k + i] += (float)codes[64 * k + i] * s;
    }
    return 1;
}

int encode_int4(float *restrict r, uint32_t *restrict w, long n) {
    uint16_t *scales = (uint16_t *)w;
    uint8_t *codes = (uint8_t *)(w + n / 128);
    int32_t q[64];
    for (long k = 0; k < n / 64; k++) {
        if (!encode_block(r + 64 * k, scales + k, q, 7.0f, 0x7D800000u)) return 0;
        for (int i = 0; i < 32; i++)
            codes[32 * k + i] = (uint8_t)((q[2 * i] + 8) | (q[2 * i + 1] + 8) << 4);
    }
    return 1;
}

int add_int4(float *restrict v, const uint32_t *restrict w, long n, long n_words) {
    (void)n_words;
    const uint16_t *scales = (const uint16_t *)w;
    const uint8_t *codes = (const uint8_t *)(w + n / 128);
    if (!are_scales(scales, n / 64, 0x7D80)) return 0;
    for (long k = 0; k < n / 64; k++) {
        float s = number_of((uint32_t)scales[k] << 16);
        for (int i = 0; i < 32; i++) {
            uint8_t c = codes[32 * k + i];
            v[64 * k + 2 * i] += (float)((c & 15) - 8) * s;
            v[64 * k + 2 * i + 1] += (float)((c >> 4) - 8) * s;
        }
    }
    return 1;
}

/* Some elements: no ties at the cut, and none that is sent whole. */

int encode_top_k(float *restrict r, uint32_t *restrict w, long n, float cut) {
    long k = 0, half = n - (n - 1) / 2;
    uint32_t largest = 0;
    for (long i = 0; i < n; i++) {
        uint32_t b = bits_of(r[i]), size = b & SIZE;
        if (size >= bits_of(cut)) {
            largest = size > largest ? size : largest;
            w[k] = (uint32_t)i;
            w[half + k++] = b;
            r[i] = 0.0f;
        }
    }
    memmove(w + k, w + half, 4 * k);
    return largest < INFINITE;
}

int add_top_k(float *restrict v, const uint32_t *restrict w, long n, long n_words) {
    long k = n_words / 2;
    int valid = k == 0 || w[k - 1] < n;
    for (long i = 1; i < k; i++) valid &= w[i] > w[i - 1];
    for (long i = k; i < n_words; i++) valid &= (w[i] & SIZE) < INFINITE;
    if (!valid) return 0;
    for (long i = 0; i < k; i++) v[w[i]] += number_of(w[k + i]);
    return 1;
}

int encode_top_k_2(float *restrict r, uint32_t *restrict w, long n, float cut, float low,
                   float high) {
    long n_rows = (n + 16383) / 16384, k = 0;
    uint16_t *counts = (uint16_t *)(w + 2), *entries = (uint16_t *)(w + 2 + (n_rows + 1) / 2);
    float table[4] = {low, -low, high, -high}, middle = (low + high) / 2;
    uint32_t largest = 0;
    w[0] = bits_of(low) | bits_of(high) >> 16;
    w[1] = 0;
    memset(counts, 0, 4 * ((n_rows + 1) / 2));
    for (long i = 0; i < n; i++) {
        uint32_t b = bits_of(r[i]), size = b & SIZE;
        if (size >= bits_of(cut)) {
            largest = size > largest ? size : largest;
            uint16_t code = (uint16_t)((number_of(size) >= middle) << 1 | b >> 31);
            r[i] -= table[code];
            counts[i >> 14]++;
            entries[k++] = (uint16_t)((i & 16383) << 2 | code);
        }
    }
    entries[k] = k % 2 ? 0 : entries[k];
    return number_of(largest) < high * 65536.0f;
}

int add_top_k_2(float *restrict v, const uint32_t *restrict w, long n, long n_words) {
    long n_rows = (n + 16383) / 16384, k = 0;
    const uint16_t *counts = (const uint16_t *)(w + 2);
    const uint16_t *entries = (const uint16_t *)(w + 2 + (n_rows + 1) / 2);
    float low = number_of(w[0] & 0xFFFF0000u), high = number_of(w[0] << 16);
    float table[4] = {low, -low, high, -high};
    int valid = 1;
    for (long row = 0; row < n_rows; row++) {
        for (long i = k + 1; i < k + counts[row]; i++)
            valid &= entries[i] >> 2 > entries[i - 1] >> 2;
        k += counts[row];
    }
    if (!valid || 2 + (n_rows + 1) / 2 + (k + 1) / 2 != n_words) return 0;
    k = 0;
    for (long row = 0; row < n_rows; row++)
        for (long end = k + counts[row]; k < end; k++)
            v[row * 16384 + (entries[k] >> 2)] += table[entries[k] & 3];
    return 1;
}

int encode_threshold(float *restrict r, uint32_t *restrict w, long n, float tau) {
    long k = 4;
    uint32_t largest = 0;
    for (long i = 0; i < n; i++) {
        uint32_t b = bits_of(r[i]), size = b & SIZE;
        if (size >= bits_of(tau)) {
            largest = size > largest ? size : largest;
            w[k++] = (uint32_t)i << 1 | b >> 31;
            r[i] -= copysignf(tau, r[i]);
        }
    }
    w[0] = 0;
    w[1] = (uint32_t)(k - 4);
    w[2] = 0;
    w[3] = bits_of(tau);
    return number_of(largest) < tau * 65536.0f;
}

int add_threshold(float *restrict v, const uint32_t *restrict w, long n, long n_words) {
    float table[2] = {number_of(w[3]), -number_of(w[3])};
    int valid = n_words == 4 || w[n_words - 1] >> 1 < n;
    for (long i = 5; i < n_words; i++) valid &= w[i] >> 1 > w[i - 1] >> 1;
    if (!valid) return 0;
    for (long i = 4; i < n_words; i++) v[w[i] >> 1] += table[w[i] & 1];
    return 1;
}
