/* Counts the live bytes of a process from outside of it: preloaded, it sees every allocation of every thread.

   live: bytes that malloc has given out. peak: the most of them since observer_reset(), less what the caller has
   said by observer_leave_out() does not count. Built by the test that uses it:
   cc -O2 -shared -fPIC -o observer.so observer.c -ldl */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

static atomic_long live, left_out, peak;

static void *(*real_malloc)(size_t), *(*real_realloc)(void *, size_t);
static void *(*real_aligned_alloc)(size_t, size_t), *(*real_memalign)(size_t, size_t);
static int (*real_posix_memalign)(void **, size_t, size_t);
static void *(*real_calloc)(size_t, size_t);
static void (*real_free)(void *);

/* dlsym allocates by calloc before the real one is known. */
static char early[65536];
static size_t early_used;

static void find(void) {
    if (real_free) return;
    real_calloc = dlsym(RTLD_NEXT, "calloc");
    real_malloc = dlsym(RTLD_NEXT, "malloc");
    real_realloc = dlsym(RTLD_NEXT, "realloc");
    real_aligned_alloc = dlsym(RTLD_NEXT, "aligned_alloc");
    real_memalign = dlsym(RTLD_NEXT, "memalign");
    real_posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    real_free = dlsym(RTLD_NEXT, "free");
}

static int is_early(const void *p) { return (const char *)p >= early && (const char *)p < early + sizeof early; }

static void *born(void *p) {
    if (p) {
        long now = atomic_fetch_add(&live, malloc_usable_size(p)) + malloc_usable_size(p) - atomic_load(&left_out);
        long before = atomic_load(&peak);
        while (now > before && !atomic_compare_exchange_weak(&peak, &before, now)) {}
    }
    return p;
}

static void gone(void *p) { if (p) atomic_fetch_sub(&live, malloc_usable_size(p)); }

void *malloc(size_t n) { find(); return born(real_malloc(n)); }
void *calloc(size_t n, size_t size) {
    if (!real_calloc) {
        void *p = early + early_used;
        early_used += (n * size + 15) & ~(size_t)15;
        return early_used <= sizeof early ? p : NULL;
    }
    find();
    return born(real_calloc(n, size));
}
void *realloc(void *p, size_t n) {
    find();
    if (is_early(p)) { void *q = malloc(n); if (q) memcpy(q, p, n); return q; }
    gone(p);
    void *q = real_realloc(p, n);
    born(q ? q : p);
    return q;
}
void *aligned_alloc(size_t a, size_t n) { find(); return born(real_aligned_alloc(a, n)); }
void *memalign(size_t a, size_t n) { find(); return born(real_memalign(a, n)); }
int posix_memalign(void **p, size_t a, size_t n) {
    find();
    int failed = real_posix_memalign(p, a, n);
    if (!failed) born(*p);
    return failed;
}
void free(void *p) { if (is_early(p)) return; find(); gone(p); real_free(p); }

long observer_live(void) { return atomic_load(&live); }
long observer_peak(void) { return atomic_load(&peak); }
void observer_leave_out(long bytes) { atomic_store(&left_out, bytes); }
long observer_reset(void) {
    long now = atomic_load(&live) - atomic_load(&left_out);
    atomic_store(&peak, now);
    return now;
}
