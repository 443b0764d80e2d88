// The state of the node, asked for again and again; with growing pauses while there is no answer.

const POLL_MILLISECONDS = 1000;
const MAX_PAUSE_MILLISECONDS = 30000;
const SILENCE_MILLISECONDS = 8000;
const HIDDEN_MILLISECONDS = 10 * 60 * 1000;

/**
 * Call `onState(state)` with each state, and `onConnection({isConnected, seen, next})` when the
 * exporter is back, when it stops answering, and at each further try; `seen` and `next` are the
 * times of the last state and of the next try, in milliseconds. A page that was out of sight for
 * ten minutes stops asking. Return {retry()}, which tries at once.
 */
export function follow(onState, onConnection) {
  let seen = null;
  let isConnected = null;
  let pause = POLL_MILLISECONDS;
  let timer = 0;
  let sleeping = 0;
  let isAsleep = false;
  let turn = 0;

  async function ask() {
    stop();
    const own = turn;
    const state = await answered();
    if (own !== turn) return; // the page has asked again, or does not want to know
    if (state) receive(state);
    else lose();
  }

  function receive(state) {
    seen = Date.now();
    pause = POLL_MILLISECONDS;
    if (isConnected !== true) onConnection({ isConnected: true, seen });
    isConnected = true;
    timer = setTimeout(ask, POLL_MILLISECONDS);
    onState(state);
  }

  function lose() {
    isConnected = false;
    pause = Math.min(pause * 2, MAX_PAUSE_MILLISECONDS);
    onConnection({ isConnected, seen, next: Date.now() + pause });
    timer = setTimeout(ask, pause);
  }

  function stop() {
    clearTimeout(timer);
    turn += 1;
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
      ask();
    }
  });
  ask();
  return { retry: ask };
}

/** Return the state, null without an answer. */
async function answered() {
  try {
    const answer = await fetch("api/v1/state", { cache: "no-store", signal: AbortSignal.timeout(SILENCE_MILLISECONDS) });
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}
