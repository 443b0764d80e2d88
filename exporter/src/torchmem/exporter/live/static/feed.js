// The state of the node as it comes: a stream of server-sent events, or polls if there are too
// many streams. It reconnects automatically, with growing pauses.

const REOPEN_MILLISECONDS = 500;
const POLL_MILLISECONDS = 2000;
const MAX_PAUSE_MILLISECONDS = 30000;
const SILENCE_MILLISECONDS = 8000;
const HIDDEN_MILLISECONDS = 10 * 60 * 1000;

/**
 * Call `onState(state)` with each new state, and `onConnection({isConnected, seen, next})` when the
 * exporter is back, when it stops answering, and at each further try; `seen` and `next` are the
 * times of the last state and of the next try, in milliseconds. A page that was out of sight for
 * ten minutes stops asking. Return {retry()}, which tries at once.
 */
export function follow(onState, onConnection) {
  let seen = null;
  let isConnected = null;
  let pause = REOPEN_MILLISECONDS;
  let source = null;
  let timer = 0;
  let silence = 0;
  let sleeping = 0;
  let isAsleep = false;

  function receive(text) {
    seen = Date.now();
    pause = REOPEN_MILLISECONDS;
    watch();
    if (isConnected !== true) onConnection({ isConnected: true, seen });
    isConnected = true;
    onState(JSON.parse(text));
  }

  function watch() {
    clearTimeout(silence);
    silence = setTimeout(lose, SILENCE_MILLISECONDS);
  }

  /** Open a stream. One that ends after a state is opened again; for one that is refused, poll. */
  function listen() {
    stop();
    let hasStates = false;
    const opened = new EventSource("api/v1/events");
    source = opened;
    watch();
    opened.onmessage = (event) => {
      hasStates = true;
      receive(event.data);
    };
    opened.onerror = () => {
      if (source !== opened) return;
      stop();
      if (hasStates) timer = setTimeout(listen, REOPEN_MILLISECONDS);
      else poll();
    };
  }

  async function poll() {
    try {
      const answer = await fetch("api/v1/state", { cache: "no-store", signal: AbortSignal.timeout(SILENCE_MILLISECONDS) });
      if (!answer.ok) throw new Error(String(answer.status));
      receive(await answer.text());
      timer = setTimeout(listen, POLL_MILLISECONDS);
    } catch {
      lose();
    }
  }

  function lose() {
    stop();
    if (isAsleep) return;
    isConnected = false;
    pause = Math.min(pause * 2, MAX_PAUSE_MILLISECONDS);
    onConnection({ isConnected, seen, next: Date.now() + pause });
    timer = setTimeout(listen, pause);
  }

  function stop() {
    clearTimeout(timer);
    clearTimeout(silence);
    source?.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(sleeping);
    if (document.hidden) {
      sleeping = setTimeout(() => {
        isAsleep = true;
        stop();
      }, HIDDEN_MILLISECONDS);
    } else if (isAsleep || isConnected === false) {
      if (isAsleep) isConnected = null;
      isAsleep = false;
      listen();
    }
  });
  listen();
  return { retry: listen };
}
