// AMX in software, for a processor without it: run a program with this library in LD_PRELOAD.
//
//     cc -O2 -shared -fPIC -o amx_emulator.so amx_emulator.c
//
// The processor raises SIGILL at each AMX instruction, and the handler does what the instruction does: configuration,
// loads and stores of tiles, and the four products of bytes. What a processor refuses ends the program with SIGILL here:
// a tile that is not configured, or sizes that do not fit. The kernel's permission to use tiles is asked for by
// syscall(), and given to the thread that asks. A thread without it may not use tiles: stricter than Linux, where one
// thread asks for all. On a processor with AMX, nothing is emulated.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define NUM_TILES 8
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XTILEDATA 18

struct config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];  // of a row
    uint8_t rows[16];
};

static __thread struct config config;
static __thread uint8_t tiles[NUM_TILES][16][64];
static __thread bool permitted;
static atomic_long num_products;

long syscall(long number, ...) {
    va_list list;
    long a[6];
    va_start(list, number);
    for (int i = 0; i < 6; i++) {
        a[i] = va_arg(list, long);
    }
    va_end(list);
    long result;
    register long r10 __asm__("r10") = a[3], r8 __asm__("r8") = a[4], r9 __asm__("r9") = a[5];
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    if (number == SYS_arch_prctl && a[0] == ARCH_REQ_XCOMP_PERM && a[1] == XTILEDATA) {
        permitted = true;
        return 0;
    }
    if (result < 0 && result > -4096) {
        errno = (int) -result;
        return -1;
    }
    return result;
}

// A thread that blocks all signals, such as those of llama/threads.c, still gets the one that is handled here.
int pthread_sigmask(int how, const sigset_t * set, sigset_t * old) {
    int (*real)(int, const sigset_t *, sigset_t *) =
        (int (*)(int, const sigset_t *, sigset_t *)) dlsym(RTLD_NEXT, "pthread_sigmask");
    sigset_t allowed;
    if (set && how != SIG_UNBLOCK) {
        allowed = *set;
        sigdelset(&allowed, SIGILL);
        set = &allowed;
    }
    return real(how, set, old);
}

// The registers in the order of their numbers in an instruction.
static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

static bool usable(int tile) {
    return permitted && config.palette == 1 && config.rows[tile] && config.bytes[tile];
}

static bool load_config(const void * memory) {
    struct config new;
    memcpy(&new, memory, sizeof(new));
    for (int i = 0; i < 16; i++) {
        bool none = !new.rows[i] && !new.bytes[i];
        bool fits = i < NUM_TILES && new.rows[i] && new.bytes[i] && new.rows[i] <= 16 && new.bytes[i] <= 64;
        if (new.palette == 1 && !none && !fits) {
            return false;
        }
    }
    if (new.palette > 1 || new.start_row) {
        return false;
    }
    config = new;
    memset(tiles, 0, sizeof(tiles));
    return true;
}

static bool product(int to, int a, int b, int kind) {
    if (!usable(to) || !usable(a) || !usable(b) || to == a || to == b || a == b) {
        return false;
    }
    if (config.rows[to] != config.rows[a] || config.bytes[to] != config.bytes[b] ||
        config.bytes[a] != 4 * config.rows[b]) {
        return false;
    }
    bool signed_a = kind == 3 || kind == 2, signed_b = kind == 3 || kind == 1;  // F2: both, F3: a, 66: b
    for (int m = 0; m < config.rows[to]; m++) {
        int32_t * sums = (int32_t *) tiles[to][m];
        for (int k = 0; k < config.rows[b]; k++) {
            for (int n = 0; n < config.bytes[to] / 4; n++) {
                for (int i = 0; i < 4; i++) {
                    uint8_t x = tiles[a][m][4 * k + i], y = tiles[b][k][4 * n + i];
                    sums[n] += (signed_a ? (int8_t) x : x) * (signed_b ? (int8_t) y : y);
                }
            }
        }
    }
    atomic_fetch_add_explicit(&num_products, 1, memory_order_relaxed);
    return true;
}

// Do what the instruction does; return its length, or 0 for one that is illegal.
static int step(const uint8_t * code, greg_t * registers) {
    if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84)) {  // VEX, 0F 38, W0, 128 bits
        return 0;
    }
    int kind = code[2] & 3;  // of the prefix: none, 66, F3, F2
    int extra = ~code[2] >> 3 & 15, mode = code[4] >> 6, reg = code[4] >> 3 & 7, rm = code[4] & 7;
    if (code[3] == 0x5e && mode == 3) {
        return product(reg, rm, extra, kind) ? 5 : 0;
    }
    if (code[3] == 0x49 && mode == 3) {
        if (kind == 3 && usable(reg)) {  // tilezero
            memset(tiles[reg], 0, sizeof(tiles[reg]));
            return 5;
        }
        if (kind == 0 && code[4] == 0xc0) {  // tilerelease
            memset(&config, 0, sizeof(config));
            return 5;
        }
        return 0;
    }
    // An operand in memory: base, and scaled index where there is one.
    int length = 5, base = rm, index = 4, scale = 0;
    if (rm == 4) {
        scale = code[5] >> 6;
        index = (code[5] >> 3 & 7) | (code[1] & 0x40 ? 0 : 8);
        base = code[5] & 7;
        length = 6;
    }
    int64_t place = 0, stride = index == 4 ? 0 : registers[order[index]] << scale;
    if (mode == 0 && base == 5) {
        int32_t offset;
        memcpy(&offset, code + length, 4);
        length += 4;
        place = offset + (rm == 5 ? registers[REG_RIP] + length : 0);
    } else {
        place = registers[order[base | (code[1] & 0x20 ? 0 : 8)]];
        if (mode == 1) {
            place += (int8_t) code[length++];
        } else if (mode == 2) {
            int32_t offset;
            memcpy(&offset, code + length, 4);
            length += 4;
            place += offset;
        }
    }
    if (code[3] == 0x49 && reg == 0 && kind == 0) {
        return load_config((const void *) (place + stride)) ? length : 0;
    }
    if (code[3] != 0x4b || rm != 4 || !usable(reg) || (kind != 3 && kind != 2)) {
        return 0;
    }
    for (int m = 0; m < 16; m++) {
        void * row = (void *) (place + m * stride);
        if (kind == 3) {
            memset(tiles[reg][m], 0, 64);
        }
        if (m < config.rows[reg] && kind == 3) {
            memcpy(tiles[reg][m], row, config.bytes[reg]);
        } else if (m < config.rows[reg]) {
            memcpy(row, tiles[reg][m], config.bytes[reg]);
        }
    }
    return length;
}

static void on_illegal(int number, siginfo_t * info, void * context) {
    (void) info;
    greg_t * registers = ((ucontext_t *) context)->uc_mcontext.gregs;
    int length = step((const uint8_t *) registers[REG_RIP], registers);
    if (length == 0) {
        signal(number, SIG_DFL);  // the instruction runs again, and ends the program
    }
    registers[REG_RIP] += length;
}

__attribute__((constructor)) static void install(void) {
    struct sigaction action = {.sa_sigaction = on_illegal, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGILL, &action, NULL);
}

__attribute__((destructor)) static void report(void) {
    if (num_products && getenv("AMX_REPORT")) {
        fprintf(stderr, "AMX: %ld products of tiles\n", num_products);
    }
}
