// What stands between a host and its line: nothing, a firewall, or a router that translates addresses (NAT). For emulator.c.
//
//   gate HOST KIND IDLE_s RESET     KIND: 0 open, 1 firewall, then routers: 2 full cone, 3 address-restricted, 4 port-restricted, 5 symmetric
//
// A host behind a router has the address 192.168.0.HOST, and its packets leave with its own address of the network. A router maps a
// port of the host to a port outside; a cone uses the same one towards everybody, a symmetric one another towards each address and port.
// A full cone lets everybody in through a mapped port, an address-restricted one those addresses that the host has sent to, all others
// those addresses and ports. A firewall does as the last, without translation. A connection without a packet for IDLE_s is forgotten:
// later packets of it are dropped, or answered with a reset.
enum Kind { OPEN, FIREWALL, FULL_CONE, ADDRESS_RESTRICTED, PORT_RESTRICTED, SYMMETRIC };

typedef struct Flow {
  struct Flow *next;
  uint32_t remote;
  uint16_t remote_port, inside, outside;
  unsigned char protocol;
  double used;
} Flow;
typedef struct { int kind; double idle_s; bool reset; Flow *flows; uint16_t drawn; } Gate;

static Gate gates[MAX_HOSTS];

enum { TCP = 6, UDP = 17, FIRST_DRAWN = 20000 };

static uint16_t get16(const unsigned char *at) { return at[0] << 8 | at[1]; }
static uint32_t get32(const unsigned char *at) { uint32_t v; memcpy(&v, at, 4); return v; }

// Put an address and a port in place of a packet's (12 and 0: the sender's, 16 and 2: the receiver's); the receiver's kernel makes the sum.
static void rewrite(Frame *f, int len, int at, const unsigned char address[4], uint16_t port) {
  int ip = (f->ip[0] & 15) * 4;
  unsigned char *segment = f->ip + ip, protocol = f->ip[9];
  memcpy(f->ip + at, address, 4);
  put16(segment + (at == 12 ? 0 : 2), port);
  put16(f->ip + 10, 0);
  put16(f->ip + 10, ~folded(sum(f->ip, ip, 0)));
  put16(segment + (protocol == TCP ? 16 : 6), folded(sum(f->ip + 12, 8, protocol + len - ip)));
  f->head.flags = VIRTIO_NET_HDR_F_NEEDS_CSUM;
  f->head.csum_start = ip;
  f->head.csum_offset = protocol == TCP ? 16 : 6;
}

// To the sender of a TCP packet, in the name of the one it was for.
static Frame *reset_of(Frame *f) {
  int ip = (f->ip[0] & 15) * 4;
  Frame *r = calloc(1, sizeof *r + 40);
  if (!r) fail("memory");
  unsigned char *tcp = r->ip + 20;
  r->ip[0] = 0x45; r->ip[8] = 64; r->ip[9] = TCP; put16(r->ip + 2, 40);
  memcpy(r->ip + 12, f->ip + 16, 4);
  memcpy(tcp + 2, f->ip + ip, 2);
  memcpy(tcp + 4, f->ip + ip + 8, 4);  // the sequence number that is expected
  tcp[12] = 0x50; tcp[13] = 0x04;
  rewrite(r, 40, 16, f->ip + 12, get16(f->ip + ip));
  rewrite(r, 40, 12, f->ip + 16, get16(f->ip + ip + 2));
  return r;
}

static bool opens(Frame *f) { int ip = (f->ip[0] & 15) * 4; return f->ip[9] != TCP || (f->ip[ip + 13] & 0x12) == 0x02; }

static bool live(Gate *g, Flow *flow) { return now() - flow->used <= g->idle_s; }

static Flow *new_flow(Gate *g, unsigned char protocol, uint16_t inside, uint16_t outside, uint32_t remote, uint16_t remote_port) {
  Flow *flow = malloc(sizeof *flow);
  if (!flow) fail("memory");
  *flow = (Flow){g->flows, remote, remote_port, inside, outside, protocol, now()};
  return g->flows = flow;
}

static Flow *outgoing(Gate *g, Frame *f, unsigned char protocol, uint16_t inside, uint32_t remote, uint16_t remote_port) {
  uint16_t outside = inside;
  for (Flow *flow = g->flows; flow; flow = flow->next) {
    if (flow->protocol != protocol || flow->inside != inside || !live(g, flow)) continue;
    if (flow->remote == remote && flow->remote_port == remote_port) return flow;
    outside = flow->outside;
  }
  if (!opens(f)) return NULL;
  if (g->kind == SYMMETRIC) outside = FIRST_DRAWN + (g->drawn = (g->drawn + 1 + (uint16_t)(draw() * 50)) % 40000);
  return new_flow(g, protocol, inside, outside, remote, remote_port);
}

static Flow *incoming(Gate *g, Frame *f, unsigned char protocol, uint16_t outside, uint32_t remote, uint16_t remote_port) {
  Flow *mapping = NULL, *address = NULL;
  for (Flow *flow = g->flows; flow; flow = flow->next) {
    if (flow->protocol != protocol || flow->outside != outside || !live(g, flow)) continue;
    if (flow->remote == remote && flow->remote_port == remote_port) return flow;
    mapping = flow;
    if (flow->remote == remote) address = flow;
  }
  Flow *by = g->kind == FULL_CONE ? mapping : g->kind == ADDRESS_RESTRICTED ? address : NULL;
  if (!opens(f) || (!by && g->kind != OPEN)) return NULL;
  return new_flow(g, protocol, by ? by->inside : outside, outside, remote, remote_port);
}

// False: the packet ends here. `out`: it leaves the host.
static bool passes(int host, Frame *f, int len, bool out, Frame **answer) {
  Gate *g = &gates[host];
  int ip = (f->ip[0] & 15) * 4;
  unsigned char protocol = f->ip[9];
  *answer = NULL;
  if ((g->kind == OPEN && isinf(g->idle_s)) || f->ip[0] >> 4 != 4) return true;
  if ((protocol != TCP && protocol != UDP) || len < ip + 8) return g->kind < FULL_CONE;
  uint32_t remote = get32(f->ip + (out ? 16 : 12));
  uint16_t from = get16(f->ip + ip), to = get16(f->ip + ip + 2);
  Flow *flow = out ? outgoing(g, f, protocol, from, remote, to) : incoming(g, f, protocol, to, remote, from);
  if (!flow) {
    if (protocol == TCP && g->reset && !opens(f) && !(f->ip[ip + 13] & 0x04)) *answer = reset_of(f);
    return false;
  }
  flow->used = now();
  if (g->kind < FULL_CONE) return true;
  if (out) rewrite(f, len, 12, (unsigned char[]){11, 77, 0, host + 1}, flow->outside);
  else rewrite(f, len, 16, (unsigned char[]){192, 168, 0, host + 1}, flow->inside);
  return true;
}
