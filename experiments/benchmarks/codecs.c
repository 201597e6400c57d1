/* The yardstick of codecs.py: one plain pass each. For n a multiple of 128. */

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
static inline float number_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

void encode_bfloat16(float *restrict r, const float *restrict p, uint16_t *restrict w, long n) {
    for (long i = 0; i < n; i++) {
        float x = r[i] + p[i];
        uint32_t b = bits_of(x) + 0x8000u;
        if ((b & 0x7FFFFFFFu) > 0x7F7FFFFFu) b = (b & 0x80000000u) | 0x7F7F0000u;
        w[i] = b >> 16;
        r[i] = x - number_of(b & 0xFFFF0000u);
    }
}

void decode_bfloat16(float *restrict v, const uint16_t *restrict w, long n) {
    for (long i = 0; i < n; i++) v[i] += number_of((uint32_t)w[i] << 16);
}

static inline void encode_block(float *restrict r, const float *restrict p, uint16_t *scale,
                                int32_t *restrict q, float last, uint32_t most) {
    uint32_t largest = 0;
    for (int i = 0; i < 64; i++) {
        r[i] += p[i];
        uint32_t b = bits_of(r[i]) & 0x7FFFFFFFu;
        largest = b > largest ? b : largest;
    }
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
}

void encode_int8(float *restrict r, const float *restrict p, uint32_t *restrict w, long n) {
    uint16_t *scales = (uint16_t *)w;
    int8_t *codes = (int8_t *)(w + n / 128);
    int32_t q[64];
    for (long k = 0; k < n / 64; k++) {
        encode_block(r + 64 * k, p + 64 * k, scales + k, q, 127.0f, 0x7B800000u);
        for (int i = 0; i < 64; i++) codes[64 * k + i] = (int8_t)q[i];
    }
}

void decode_int8(float *restrict v, const uint32_t *restrict w, long n) {
    const uint16_t *scales = (const uint16_t *)w;
    const int8_t *codes = (const int8_t *)(w + n / 128);
    for (long k = 0; k < n / 64; k++) {
        float s = number_of((uint32_t)scales[k] << 16);
        for (int i = 0; i < 64; i++) v[64 * k + i] += (float)codes[64 * k + i] * s;
    }
}

void encode_int4(float *restrict r, const float *restrict p, uint32_t *restrict w, long n) {
    uint16_t *scales = (uint16_t *)w;
    uint8_t *codes = (uint8_t *)(w + n / 128);
    int32_t q[64];
    for (long k = 0; k < n / 64; k++) {
        encode_block(r + 64 * k, p + 64 * k, scales + k, q, 7.0f, 0x7D800000u);
        for (int i = 0; i < 32; i++)
            codes[32 * k + i] = (uint8_t)((q[2 * i] + 8) | (q[2 * i + 1] + 8) << 4);
    }
}

void decode_int4(float *restrict v, const uint32_t *restrict w, long n) {
    const uint16_t *scales = (const uint16_t *)w;
    const uint8_t *codes = (const uint8_t *)(w + n / 128);
    for (long k = 0; k < n / 64; k++) {
        float s = number_of((uint32_t)scales[k] << 16);
        for (int i = 0; i < 32; i++) {
            uint8_t c = codes[32 * k + i];
            v[64 * k + 2 * i] += (float)((c & 15) - 8) * s;
            v[64 * k + 2 * i + 1] += (float)((c >> 4) - 8) * s;
        }
    }
}

void encode_top_k(float *restrict r, const float *restrict p, uint32_t *restrict w, long n,
                  float cut) {
    long k = 0, half = n - (n - 1) / 2;
    for (long i = 0; i < n; i++) {
        float x = r[i] + p[i];
        if (fabsf(x) >= cut) {
            w[k] = (uint32_t)i;
            w[half + k++] = bits_of(x);
            x = 0.0f;
        }
        r[i] = x;
    }
    memmove(w + k, w + half, 4 * k);
}

void decode_top_k(float *restrict v, const uint32_t *restrict w, long n, long n_words) {
    (void)n;
    for (long i = 0; i < n_words / 2; i++) v[w[i]] += number_of(w[n_words / 2 + i]);
}

void encode_threshold(float *restrict r, const float *restrict p, uint32_t *restrict w, long n,
                      float tau) {
    long k = 4;
    for (long i = 0; i < n; i++) {
        float x = r[i] + p[i];
        if (fabsf(x) >= tau) {
            w[k++] = (uint32_t)i << 1 | bits_of(x) >> 31;
            x -= copysignf(tau, x);
        }
        r[i] = x;
    }
    w[0] = 0;
    w[1] = (uint32_t)(k - 4);
    w[2] = 0;
    w[3] = bits_of(tau);
}

void decode_threshold(float *restrict v, const uint32_t *restrict w, long n, long n_words) {
    float tau = number_of(w[3]);
    (void)n;
    for (long i = 4; i < n_words; i++) v[w[i] >> 1] += w[i] & 1 ? -tau : tau;
}
