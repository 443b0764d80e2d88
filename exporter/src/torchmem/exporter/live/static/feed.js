// The state of the node as it comes: a stream of server-sent events, or polls if there are too
// many streams. It reconnects automatically.

const RETRY_MILLISECONDS = 2000;
const GRACE_MILLISECONDS = 2500;
const SILENCE_MILLISECONDS = 8000;
const HIDDEN_MILLISECONDS = 10 * 60 * 1000;

/**
 * Call `onState(state)` with each new state, and `onConnection(isConnected)` when the exporter stops
 * answering and when it is back. A page that was out of sight for ten minutes stops asking.
 */
export function follow(onState, onConnection) {
  let heardAt = performance.now();
  let isConnected = null;
  let source = null;
  let sleeping = 0;

  function tell(value) {
    if (isConnected !== value) onConnection(value);
    isConnected = value;
  }

  function receive(text) {
    heardAt = performance.now();
    tell(true);
    onState(JSON.parse(text));
  }

  function listen() {
    source = new EventSource("api/v1/events");
    source.onmessage = (event) => receive(event.data);
    source.onerror = () => {
      const failedAt = performance.now();
      setTimeout(() => heardAt < failedAt && tell(false), GRACE_MILLISECONDS);
      // The browser opens a stream that has ended again, but not one that was refused.
      if (source?.readyState === EventSource.CLOSED) poll();
    };
  }

  async function poll() {
    try {
      const answer = await fetch("api/v1/state", { cache: "no-store" });
      if (answer.ok) receive(await answer.text());
    } catch {
      // The exporter is not there; the interval below says so.
    }
    setTimeout(() => source && listen(), RETRY_MILLISECONDS);
  }

  function stop() {
    source?.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(sleeping);
    if (document.hidden) sleeping = setTimeout(stop, HIDDEN_MILLISECONDS);
    else if (source === null) listen();
  });
  setInterval(() => {
    if (performance.now() - heardAt > SILENCE_MILLISECONDS) tell(false);
  }, 1000);
  listen();
}
