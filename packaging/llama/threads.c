// The part of OpenMP that ggml uses, over threads whose way of waiting can be changed while they run.
//
// libgomp reads once, when it is loaded, whether its threads spin or sleep. Spinning threads are up to twice as fast on
// a quiet machine and 10 times as slow on a busy one, and a machine is both in turn. Here a thread that waits spins for
// `spin_us` microseconds, which edgelm_spin_us() changes, and then sleeps until it is woken.
//
// GCC compiles ggml's `#pragma omp` into calls of the functions below. They are hidden, so that a libgomp in the same
// process is never called in their place, and takes no calls of ours.

#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define HIDDEN __attribute__((visibility("hidden")))
#define EXPORTED __attribute__((visibility("default")))
#define MAX_THREADS 512
#define SPINS_PER_CLOCK 32  // one look at the clock for so many looks at the variable

static atomic_int spin_us = 0;

EXPORTED void edgelm_spin_us(int microseconds) { atomic_store(&spin_us, microseconds); }

// A number that a thread waits for to change, alone in its cache line.
struct gate {
    _Alignas(64) atomic_uint value;
    atomic_uint sleepers;
};

struct worker {
    struct pool * pool;
    int index;
    pthread_t thread;
};

// The threads of one calling thread. The caller is number 0 of each team.
struct pool {
    struct gate work;     // counts the jobs
    struct gate barrier;  // counts the barriers that all have reached
    struct gate done;     // counts the jobs that all have finished
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int running;
    void (*job)(void *);
    void * data;
    int team_size;
    bool stop;
    int num_workers;
    struct worker workers[MAX_THREADS];
};

static pthread_key_t pool_key;
static pthread_once_t pool_once = PTHREAD_ONCE_INIT;
static _Thread_local struct pool * team;  // that this thread computes for; null outside of a job
static _Thread_local int thread_index;

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

static int64_t now_us(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t) time.tv_sec * 1000000 + time.tv_nsec / 1000;
}

static void wait_for_change(struct gate * gate, unsigned old) {
    int limit_us = atomic_load_explicit(&spin_us, memory_order_relaxed);
    if (limit_us > 0) {
        int64_t end = now_us() + limit_us;
        do {
            for (int i = 0; i < SPINS_PER_CLOCK; i++) {
                if (atomic_load_explicit(&gate->value, memory_order_acquire) != old) {
                    return;
                }
                relax();
            }
        } while (now_us() < end);
    }
    atomic_fetch_add(&gate->sleepers, 1);
    while (atomic_load(&gate->value) == old) {
        // The kernel compares again: a change between the line above and this one is not missed.
        syscall(SYS_futex, &gate->value, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    }
    atomic_fetch_sub(&gate->sleepers, 1);
}

static void open_gate(struct gate * gate) {
    atomic_fetch_add(&gate->value, 1);
    if (atomic_load(&gate->sleepers) > 0) {
        syscall(SYS_futex, &gate->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    }
}

static void * work(void * argument) {
    struct worker * self = argument;
    struct pool * pool = self->pool;
    thread_index = self->index;
    // The pool was at rest when this thread was made, and `work` is counted up next.
    unsigned seen = atomic_load(&pool->work.value);
    atomic_fetch_sub(&pool->running, 1);
    for (;;) {
        wait_for_change(&pool->work, seen);
        seen = atomic_load(&pool->work.value);
        if (pool->stop) {
            return NULL;
        }
        if (self->index < pool->team_size) {
            team = pool;
            pool->job(pool->data);
            team = NULL;
        }
        // All workers answer, so that none can be a job behind.
        if (atomic_fetch_sub(&pool->running, 1) == 1) {
            open_gate(&pool->done);
        }
    }
}

static void free_pool(void * argument) {
    struct pool * pool = argument;
    pool->stop = true;
    open_gate(&pool->work);
    for (int i = 1; i <= pool->num_workers; i++) {
        pthread_join(pool->workers[i].thread, NULL);
    }
    free(pool);
}

static void make_key(void) { pthread_key_create(&pool_key, free_pool); }

static struct pool * own_pool(void) {
    pthread_once(&pool_once, make_key);
    struct pool * pool = pthread_getspecific(pool_key);
    if (!pool) {
        pool = aligned_alloc(_Alignof(struct pool), sizeof(struct pool));
        if (pool) {
            *pool = (struct pool) {0};
            pthread_setspecific(pool_key, pool);
        }
    }
    return pool;
}

// Start threads until there are `count`; fewer if the system refuses.
static void grow(struct pool * pool, int count) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);  // signals are for the program's own threads
    while (pool->num_workers < count) {
        int index = pool->num_workers + 1;
        pool->workers[index].pool = pool;
        pool->workers[index].index = index;
        atomic_store(&pool->running, 1);
        if (pthread_create(&pool->workers[index].thread, NULL, work, &pool->workers[index])) {
            atomic_store(&pool->running, 0);
            break;
        }
        pool->num_workers = index;
        while (atomic_load(&pool->running)) {  // it must have read the number of jobs before the next one
            sched_yield();
        }
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

static int default_size(void) {
    cpu_set_t allowed;
    return sched_getaffinity(0, sizeof(allowed), &allowed) ? 1 : CPU_COUNT(&allowed);
}

HIDDEN void GOMP_parallel(void (*job)(void *), void * data, unsigned num_threads, unsigned flags) {
    (void) flags;
    struct pool * outer = team;
    int size = num_threads ? (int) num_threads : default_size();
    size = size < MAX_THREADS ? size : MAX_THREADS - 1;
    struct pool * pool = size > 1 && !outer ? own_pool() : NULL;  // a team inside of a team is one thread
    if (pool && pool->num_workers < size - 1) {
        grow(pool, size - 1);
    }
    if (!pool || pool->num_workers == 0) {
        int index = thread_index;
        team = NULL;
        thread_index = 0;
        job(data);
        team = outer;
        thread_index = index;
        return;
    }
    pool->job = job;
    pool->data = data;
    pool->team_size = size <= pool->num_workers ? size : pool->num_workers + 1;
    atomic_store(&pool->running, pool->num_workers);
    unsigned done = atomic_load(&pool->done.value);
    team = pool;
    thread_index = 0;
    open_gate(&pool->work);
    job(data);
    team = NULL;
    wait_for_change(&pool->done, done);
}

HIDDEN void GOMP_barrier(void) {
    struct pool * pool = team;
    if (!pool) {
        return;
    }
    unsigned passed = atomic_load(&pool->barrier.value);
    if (atomic_fetch_add(&pool->arrived, 1) + 1 == pool->team_size) {
        atomic_store(&pool->arrived, 0);
        open_gate(&pool->barrier);
    } else {
        wait_for_change(&pool->barrier, passed);
    }
}

HIDDEN bool GOMP_single_start(void) { return thread_index == 0; }

HIDDEN int omp_get_num_threads(void) { return team ? team->team_size : 1; }

HIDDEN int omp_get_thread_num(void) { return team ? thread_index : 0; }
