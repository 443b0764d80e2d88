// The page of one board: reads its view from the server, draws it, and offers `window.dashboard` to
// draw.mjs.
import { createTheme, dateMath, dateTime, ThemeContext } from "@grafana/data";
import { GlobalStyles } from "@grafana/ui";
import { createRoot } from "react-dom/client";
import { readAnnotations } from "./annotations.jsx";
import { Board } from "./board.jsx";
import { placed } from "./layout.js";
import { register } from "./registries.js";
import { makeReport } from "./report.js";
import { readVariables } from "./variables.js";
import "./main.css";

const PADDING = 16;
const QUIET = 400; // milliseconds without a change of the page

/** Move the clock of the page: "now" is the end of the time range. */
function moveClock(at) {
  const real = Date.now;
  const offset = at - real();
  Date.now = () => real() + offset;
}

function rangeOf(board, range) {
  const raw = range
    ? { from: `now-${range}`, to: "now" }
    : (board.time ?? { from: "now-6h", to: "now" });
  // The clock goes on: without whole seconds, equal boards would have slightly different ranges.
  const seconds = (text, roundUp) =>
    dateTime(Math.floor(dateMath.parse(text, roundUp) / 1000) * 1000);
  return { from: seconds(raw.from, false), to: seconds(raw.to, true), raw };
}

function watchChanges() {
  let changed = performance.now();
  const note = () => (changed = performance.now());
  new MutationObserver(note).observe(document.body, {
    childList: true,
    subtree: true,
    attributes: true,
  });
  window.addEventListener("resize", note);
  return () => performance.now() - changed;
}

function Page({ theme, children }) {
  const colors = { "--muted": theme.colors.text.secondary, "--border": theme.colors.border.medium };
  const style = { padding: PADDING, background: theme.colors.background.canvas, ...colors };
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div className="page" style={{ ...style, "--field": theme.components.input.background }}>
        {children}
      </div>
    </ThemeContext.Provider>
  );
}

async function main() {
  const view = await (await fetch("view.json")).json();
  const { board } = view;
  moveClock(view.at);
  const range = rangeOf(board, view.range);
  const theme = createTheme({ colors: { mode: view.theme ?? "dark" } });
  const variables = await readVariables(board, view.variables ?? {}, range);
  register({ range, replace: variables.replace });
  const annotations = await readAnnotations(board, variables, range);
  const context = { board, range, theme, variables, annotations: annotations.events };
  const items = placed(board.panels ?? [], variables, view.openRows);
  const width = document.documentElement.clientWidth - 2 * PADDING;
  const quiet = watchChanges();
  createRoot(document.getElementById("root")).render(
    <Page theme={theme}>
      <Board context={context} items={items} width={width} />
    </Page>,
  );
  window.dashboard = {
    isSettled: () =>
      items.every(({ panel, state }) => panel.type === "row" || state.state) && quiet() > QUIET,
    report: () => makeReport(context, items, annotations),
  };
}

main().catch((error) => {
  document.body.textContent = error.stack;
  window.dashboard = { isSettled: () => true, report: () => ({ error: error.stack, panels: [] }) };
});
