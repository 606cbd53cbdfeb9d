/* The process that holds a pod's namespaces: it waits, reaps orphans, and leaves
   on SIGTERM or SIGINT. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void leave(int signal) { (void)signal; _exit(0); }
static void reap(int signal) {
  (void)signal;
  while (waitpid(-1, NULL, WNOHANG) > 0) {
  }
}

int main(void) {
  signal(SIGTERM, leave);
  signal(SIGINT, leave);
  signal(SIGCHLD, reap);
  for (;;) pause();
}
