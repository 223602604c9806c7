/* Takes turns at the gate of its device, byte by byte as docs/gate.md has it: `turns TIMES HOLD_US`.
 *
 * 0: it had all its turns, each of them alone; 3: somebody else had the device's lock at the same time;
 * 4: LAXITY_GATE is not 1; 5: no gate, or one that says something else.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

typedef struct {
    uint8_t kind, version, zeros[6];
    uint64_t number;
} message;

static int gate = -1, lock = -1;

static int connected(const char *folder) {
    struct sockaddr_un path = {.sun_family = AF_UNIX};
    char room[CMSG_SPACE(sizeof(int))];
    message welcome = {0};
    struct iovec part = {&welcome, sizeof welcome};
    struct msghdr whole = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    snprintf(path.sun_path, sizeof path.sun_path, "%s/gate.sock", folder);
    gate = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (connect(gate, (struct sockaddr *)&path, sizeof path) || recvmsg(gate, &whole, 0) != sizeof welcome ||
        welcome.kind != 1 || welcome.version != 1 || !CMSG_FIRSTHDR(&whole)) {
        close(gate);
        return 0;
    }
    memcpy(&lock, CMSG_DATA(CMSG_FIRSTHDR(&whole)), sizeof lock);
    return 1;
}

static int turn(useconds_t hold_us) {
    message ask = {.kind = 1, .number = 50000}, done = {.kind = 2}, granted = {0};
    if (send(gate, &ask, sizeof ask, 0) < 0 || recv(gate, &granted, sizeof granted, 0) != sizeof granted ||
        granted.kind != 2)
        return 5;
    if (flock(lock, LOCK_EX | LOCK_NB))
        return 3;
    usleep(hold_us);
    flock(lock, LOCK_UN);
    return send(gate, &done, sizeof done, 0) < 0 ? 5 : 0;
}

int main(int count, char **words) {
    const char *told = getenv("LAXITY_GATE"), *folder = getenv("LAXITY_RING_DIR");
    int left = count > 2 ? atoi(words[1]) : 1, tries = 1500, code = 0;
    if (!told || strcmp(told, "1"))
        return 4;
    while (tries-- && !connected(folder ? folder : ""))
        usleep(20000);
    if (tries < 0)
        return 5;
    while (left-- && !code) {
        code = turn(count > 2 ? (useconds_t)atoi(words[2]) : 0);
        usleep(20000);
    }
    return code;
}
