// Hosts with a network of their own on one machine, and the lines between them. For lab.py, which compiles and starts it.
//
//   emulator N [FD] N hosts: 11.77.0.1 to 11.77.0.N, and any other 11.77.x.HOST or fd77::HOST that a host takes. Prints "host PID" for each, the first process of its namespaces
//                   (network, processes, mounts), then carries packets until its standard input ends. With it end the hosts
//                   and every process in them, whatever killed the program that started it. FD: an open file of the size of two
//                   Queue[64], in which it keeps all uplinks and then all downlinks.
//
// Standard input says how fast the lines are, and may change that at any time (rates in bit/s, 0: cut, inf: no limit):
//   access HOST UP_bps UP_buffer_s DOWN_bps DOWN_buffer_s
//   path FROM TO DELAY_s RATE_bps BUFFER_s LOSS MTU
//   gate HOST KIND IDLE_s RESET                         a router or a firewall: nat.h
//
// A packet waits in the sender's uplink, is lost by chance or waits in the path, travels for the delay, and waits in the receiver's
// downlink: each a queue that is served at its rate and drops what would wait for longer than its buffer. Every host has a TUN
// device with segmentation offload, so one read carries up to 64 KB of TCP, as with a real network card; lines still serve, drop and
// lose each segment of 1,500 bytes by itself, and what is left of a packet travels on in one or more pieces.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <math.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MAX_HOSTS = 64, MTU = 1500, TURN = 64, MAX_PACKET = 65536 + 64 };

typedef struct { double bps, buffer_s, free_at, served_s; uint64_t dropped; } Queue;  // free_at: on CLOCK_MONOTONIC
typedef struct { Queue queue; double delay_s, loss, mtu; } Path;
typedef struct { struct virtio_net_hdr head; unsigned char ip[]; } Frame;  // what a TUN device reads and writes
typedef struct { double due; uint64_t serial; int to, len; bool queued; Frame *frame; } Event;

static Queue own[2 * MAX_HOSTS], *up = own, *down = own + MAX_HOSTS;
static Path paths[MAX_HOSTS][MAX_HOSTS];
static int tuns[MAX_HOSTS], hosts;
static Event *heap;  // by due time, then in the order of arrival
static size_t events, room;
static uint64_t serial, chance = 88172645463325252u;

static void fail(const char *what) { fprintf(stderr, "emulator: %s: %s\n", what, strerror(errno)); exit(2); }

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }

static double draw(void) {  // xorshift64: the same losses in every run
  chance ^= chance << 13; chance ^= chance >> 7; chance ^= chance << 17;
  return (chance >> 11) * 0x1p-53;
}

// ------------------------------------------------------------------------------------------------------------------ events

static bool before(Event *a, Event *b) { return a->due != b->due ? a->due < b->due : a->serial < b->serial; }

static void schedule(Event e) {
  if (events == room && !(heap = realloc(heap, (room = room ? 2 * room : 1024) * sizeof *heap))) fail("memory");
  e.serial = serial++;
  size_t at = events++;
  for (; at && before(&e, &heap[(at - 1) / 2]); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
  heap[at] = e;
}

static Event next_event(void) {
  Event first = heap[0], last = heap[--events];
  size_t at = 0;
  for (size_t child; (child = 2 * at + 1) < events; at = child) {
    if (child + 1 < events && before(&heap[child + 1], &heap[child])) child++;
    if (!before(&heap[child], &last)) break;
    heap[at] = heap[child];
  }
  heap[at] = last;
  return first;
}

// ------------------------------------------------------------------------------------------------- packets and segments

static int header_bytes(Frame *f) {
  int ip = (f->ip[0] & 15) * 4;
  return f->head.gso_type == VIRTIO_NET_HDR_GSO_NONE ? 0 : ip + (f->ip[ip + 12] >> 4) * 4;
}

static uint32_t sum(const unsigned char *bytes, int len, uint32_t total) {
  for (int i = 0; i + 1 < len; i += 2) total += bytes[i] << 8 | bytes[i + 1];
  return total;
}

static uint16_t folded(uint32_t total) {
  while (total >> 16) total = (total & 0xffff) + (total >> 16);
  return total;
}

static void put16(unsigned char *at, uint16_t value) { at[0] = value >> 8; at[1] = value; }

// The bytes [start, end) of a large packet's payload as a packet of their own.
static Frame *piece(Frame *f, int len, int start, int end) {
  int header = header_bytes(f), ip = (f->ip[0] & 15) * 4, size = header + end - start;
  Frame *p = malloc(sizeof *p + size);
  if (!p) fail("memory");
  p->head = f->head;
  memcpy(p->ip, f->ip, header);
  memcpy(p->ip + header, f->ip + header + start, end - start);
  unsigned char *tcp = p->ip + ip;
  uint32_t first; memcpy(&first, tcp + 4, 4);
  first = htonl(ntohl(first) + start); memcpy(tcp + 4, &first, 4);
  if (header + end < len) tcp[13] &= ~0x09;  // FIN and PSH belong to the last segment
  if (start) tcp[13] &= ~0x80;               // CWR to the first
  put16(p->ip + 2, size);
  put16(p->ip + 10, 0);
  put16(p->ip + 10, ~folded(sum(p->ip, ip, 0)));
  put16(tcp + 16, folded(sum(p->ip + 12, 8, 6 + size - ip)));  // of the pseudo header: the receiver's kernel does the rest
  p->head.flags = VIRTIO_NET_HDR_F_NEEDS_CSUM;
  p->head.csum_start = ip;
  p->head.csum_offset = 16;
  if (end - start <= f->head.gso_size) { p->head.gso_type = VIRTIO_NET_HDR_GSO_NONE; p->head.gso_size = 0; }
  return p;
}

// True: the bytes leave the queue at `*at`, where they had arrived at `*at`. False: they are dropped.
static bool served(Queue *q, double *at, int bytes) {
  double start = *at > q->free_at ? *at : q->free_at;
  if (q->bps <= 0 || start - *at > q->buffer_s) { q->dropped++; return false; }
  q->free_at = *at = start + 8.0 * bytes / q->bps;
  q->served_s += 8.0 * bytes / q->bps;
  return true;
}

typedef bool Line(int from, int to, double *at, int bytes);

static bool outward(int from, int to, double *at, int bytes) {
  Path *path = &paths[from][to];
  if (!served(&up[from], at, bytes) || bytes > path->mtu || draw() < path->loss || !served(&path->queue, at, bytes)) return false;
  *at += path->delay_s;
  return true;
}

static bool inward(int from, int to, double *at, int bytes) { (void)from; return served(&down[to], at, bytes); }

// Send a packet through a line segment by segment, and schedule what is left of it. Frees the frame.
static void send_through(Line *line, Frame *f, int len, int from, int to, double arrived, bool queued) {
  int header = header_bytes(f), size = f->head.gso_size, payload = len - header;
  if (!header || payload <= size) {
    double at = arrived;
    if (line(from, to, &at, len)) schedule((Event){.due = at, .to = to, .len = len, .queued = queued, .frame = f});
    else free(f);
    return;
  }
  int start = 0, end = 0;
  double due = 0;
  for (bool more = true; more;) {
    int bytes = payload - end < size ? payload - end : size;
    double at = arrived;
    bool kept = bytes && line(from, to, &at, header + bytes);
    if (kept) { end += bytes; due = at; if (end < payload) continue; }
    if (start == 0 && end == payload) { schedule((Event){.due = due, .to = to, .len = len, .queued = queued, .frame = f}); return; }
    if (end > start)
      schedule((Event){.due = due, .to = to, .len = header + end - start, .queued = queued, .frame = piece(f, len, start, end)});
    if (!kept) end += bytes;
    start = end;
    more = end < payload;
  }
  free(f);
}

#include "nat.h"

static int receiver_of(Frame *f, int len) {  // -1: nobody's
  if (len >= 40 && f->ip[0] >> 4 == 6) return f->ip[24] == 0xfd ? f->ip[39] - 1 : -1;
  return len >= 20 && f->ip[0] >> 4 == 4 ? f->ip[19] - 1 : -1;
}

// True: the packet passes what stands before that host; else it is freed, and its sender may get a reset.
static bool gate_passed(int host, Frame *f, int len, bool out, int sender) {
  Frame *answer;
  if (passes(host, f, len, out, &answer)) return true;
  if (answer) schedule((Event){.due = now() + (out ? 0 : paths[host][sender].delay_s), .to = sender, .len = 40, .frame = answer});
  free(f);
  return false;
}

static void read_packets(int from) {
  static union { Frame frame; unsigned char bytes[sizeof(Frame) + MAX_PACKET]; } buffer;
  for (int k = 0; k < TURN; k++) {
    int len = (int)read(tuns[from], &buffer, sizeof buffer) - (int)sizeof(Frame);
    if (len < 0) return;
    int to = receiver_of(&buffer.frame, len);
    if (to < 0 || to >= hosts) continue;
    Frame *f = malloc(sizeof *f + len);
    if (!f) fail("memory");
    memcpy(f, &buffer, sizeof *f + len);
    if (gate_passed(from, f, len, true, from)) send_through(outward, f, len, from, to, now(), true);
  }
}

static void deliver(double until) {
  while (events && heap[0].due <= until) {
    Event e = next_event();
    if (e.queued && gate_passed(e.to, e.frame, e.len, false, e.frame->ip[15] - 1))
      send_through(inward, e.frame, e.len, 0, e.to, e.due, false);
    else if (e.queued) continue;
    else {
      ssize_t written = write(tuns[e.to], e.frame, sizeof *e.frame + e.len);
      if (written < 0 && errno != EIO && errno != EAGAIN) perror("emulator: write");
      free(e.frame);
    }
  }
}

// ------------------------------------------------------------------------------------------------------------------- hosts

static int host_process(void) {  // the first process of a host: with it, the kernel ends all others
  int ready[2];
  if (pipe(ready)) fail("pipe");
  int pid = syscall(SYS_clone, CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWNS | SIGCHLD, 0, 0, 0, 0);
  if (pid < 0) fail("namespaces");
  if (!pid) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(0); close(1);
    if (mount("none", "/", 0, MS_REC | MS_PRIVATE, 0) || mount("proc", "/proc", "proc", 0, 0)) fail("mount /proc");
    signal(SIGCHLD, SIG_IGN);
    close(ready[0]); close(ready[1]);
    for (;;) pause();
  }
  close(ready[1]);
  if (read(ready[0], ready, 1) != 0) fail("host");
  close(ready[0]);
  return pid;
}

static void ask(int sock, unsigned long request, struct ifreq *r) { if (ioctl(sock, request, r)) fail("configure"); }

static void set_address(struct ifreq *r, const char *text) {
  struct sockaddr_in *address = (struct sockaddr_in *)&r->ifr_addr;
  memset(address, 0, sizeof *address);
  address->sin_family = AF_INET;
  inet_pton(AF_INET, text, &address->sin_addr);
}

static int tun_of(int pid, int number) {
  char text[64];
  snprintf(text, sizeof text, "/proc/%d/ns/net", pid);
  int there = open(text, O_RDONLY | O_CLOEXEC), here = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
  if (there < 0 || here < 0 || setns(there, CLONE_NEWNET)) fail(text);
  int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), sock = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  struct ifreq r = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR, .ifr_name = "wan0"};
  if (tun < 0 || sock < 0) fail("/dev/net/tun");
  ask(tun, TUNSETIFF, &r);
  if (ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) fail("offload");
  snprintf(text, sizeof text, "11.77.0.%d", number + 1);
  set_address(&r, text); ask(sock, SIOCSIFADDR, &r);
  set_address(&r, "255.255.0.0"); ask(sock, SIOCSIFNETMASK, &r);
  r.ifr_mtu = MTU; ask(sock, SIOCSIFMTU, &r);
  r.ifr_qlen = 10000; ask(sock, SIOCSIFTXQLEN, &r);
  r.ifr_flags = IFF_UP | IFF_RUNNING; ask(sock, SIOCSIFFLAGS, &r);
  strcpy(r.ifr_name, "lo"); ask(sock, SIOCSIFFLAGS, &r);
  if (setns(here, CLONE_NEWNET)) fail("setns");
  close(there); close(here); close(sock);
  return tun;
}

static void obey(const char *line) {
  int a, b, reset;
  double v[5];
  if (sscanf(line, "access %d %lf %lf %lf %lf", &a, v, v + 1, v + 2, v + 3) == 5 && a >= 0 && a < hosts) {
    up[a].bps = v[0]; up[a].buffer_s = v[1]; down[a].bps = v[2]; down[a].buffer_s = v[3];
  } else if (sscanf(line, "gate %d %d %lf %d", &a, &b, v, &reset) == 4 && a >= 0 && a < hosts) {
    gates[a].kind = b; gates[a].idle_s = v[0]; gates[a].reset = reset;
  } else if (sscanf(line, "path %d %d %lf %lf %lf %lf %lf", &a, &b, v, v + 1, v + 2, v + 3, v + 4) == 7 && a >= 0 && a < hosts && b >= 0 && b < hosts) {
    Path *p = &paths[a][b];
    p->delay_s = v[0]; p->queue.bps = v[1]; p->queue.buffer_s = v[2]; p->loss = v[3]; p->mtu = v[4];
  } else fprintf(stderr, "emulator: not understood: %s\n", line);
}

static bool read_words(void) {  // false: standard input has ended
  static char text[65536];
  static size_t filled;
  ssize_t got = read(0, text + filled, sizeof text - 1 - filled);
  if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR);
  filled += got;
  text[filled] = 0;
  char *line = text;
  for (char *end; (end = strchr(line, '\n')); line = end + 1) { *end = 0; obey(line); }
  memmove(text, line, filled -= line - text);
  return true;
}

int main(int count, char **words) {
  hosts = count == 2 || count == 3 ? atoi(words[1]) : 0;
  if (hosts < 1 || hosts > MAX_HOSTS) { fprintf(stderr, "usage: emulator N [FD] (1 to %d hosts)\n", MAX_HOSTS); return 2; }
  if (count == 3) {
    up = mmap(NULL, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(words[2]), 0);
    if (up == MAP_FAILED) fail("counters");
    down = up + MAX_HOSTS;
  }
  struct pollfd watched[MAX_HOSTS + 1];
  for (int i = 0; i < hosts; i++) {
    int pid = host_process();
    tuns[i] = tun_of(pid, i);
    watched[i] = (struct pollfd){.fd = tuns[i], .events = POLLIN};
    gates[i].idle_s = INFINITY;
    printf("host %d\n", pid);
  }
  fflush(stdout);
  watched[hosts] = (struct pollfd){.fd = 0, .events = POLLIN};
  prctl(PR_SET_TIMERSLACK, 1000);                  // a microsecond
  setpriority(PRIO_PROCESS, 0, -20);               // the network does not wait for what it connects
  for (;;) {
    deliver(now());
    double wait_s = events ? heap[0].due - now() : 1;
    if (wait_s < 0) wait_s = 0;
    struct timespec timeout = {(time_t)wait_s, (long)((wait_s - (time_t)wait_s) * 1e9)};
    if (ppoll(watched, hosts + 1, &timeout, 0) <= 0) continue;
    if (watched[hosts].revents && !read_words()) return 0;
    for (int i = 0; i < hosts; i++) if (watched[i].revents & POLLIN) read_packets(i);
  }
}
