// A board around its panels: title, variables, links, rows, and the frame of each panel.
import { dateTimeFormat, LoadingState, rangeUtil } from "@grafana/data";
import { Icon, PanelChrome } from "@grafana/ui";
import { Component, useEffect, useState } from "react";
import { load } from "./load.js";
import { visualizations } from "./visualizations.jsx";

const COLUMNS = 24;
const UNIT = 30; // height of one grid unit, in pixels
const GAP = 8;
const HIDE_LABEL = 1;
const HIDE_VARIABLE = 2;

function boxOf({ x, y, w, h }, width) {
  const column = (width - GAP * (COLUMNS - 1)) / COLUMNS;
  return {
    left: Math.round(x * (column + GAP)),
    top: y * (UNIT + GAP),
    width: Math.round(w * column + (w - 1) * GAP),
    height: h * UNIT + (h - 1) * GAP,
  };
}

export function Board({ context, items, width }) {
  const rows = Math.max(0, ...items.map(({ place: { y, h } }) => y + h));
  return (
    <>
      <Header context={context} />
      <main style={{ height: rows * (UNIT + GAP) + GAP }}>
        {items.map((item) => {
          const box = boxOf(item.place, width);
          return (
            <section key={item.key} id={item.key} style={box}>
              {item.panel.type === "row" ? (
                <Row item={item} context={context} />
              ) : (
                <Panel item={item} context={context} box={box} />
              )}
            </section>
          );
        })}
      </main>
    </>
  );
}

function Header({ context: { board, range, variables } }) {
  const shown = variables.list.filter(({ hide }) => hide !== HIDE_VARIABLE);
  const links = (board.links ?? []).filter(({ type }) => type === "link");
  return (
    <header>
      <div className="board-title">
        <span>Dashboards › {board.title}</span>
        <span className="board-time">
          {rangeUtil.describeTimeRange(range.raw)} · {dateTimeFormat(range.from)} to{" "}
          {dateTimeFormat(range.to)}
        </span>
      </div>
      <div className="board-controls">
        {shown.map((variable) => (
          <span className="board-variable" key={variable.name}>
            {variable.hide !== HIDE_LABEL && <label>{variable.label || variable.name}</label>}
            <span className="board-value">{variable.error ?? variable.texts?.join(" + ")}</span>
          </span>
        ))}
        <span className="board-links">
          {links.map(({ title }) => (
            <span className="board-value" key={title}>
              {title}
            </span>
          ))}
        </span>
      </div>
    </header>
  );
}

function Row({ item: { panel, scope, isCollapsed }, context: { variables } }) {
  const count = panel.panels?.length ?? 0;
  return (
    <div className="board-row">
      <Icon name={isCollapsed ? "angle-right" : "angle-down"} />
      <span>{variables.replace(panel.title ?? "", scope, "text")}</span>
      {isCollapsed && (
        <span className="board-count">
          ({count} {count === 1 ? "panel" : "panels"})
        </span>
      )}
    </div>
  );
}

/** The frame of a panel; `item.state` collects what the report tells of it. */
function Panel({ item, context, box }) {
  const { panel, scope, state } = item;
  const [, redraw] = useState(0);
  const replace = (text) => context.variables.replace(text ?? "", scope, "text");
  state.title = replace(panel.title);
  const error = state.queries?.find((query) => query.error)?.error ?? state.failure;
  return (
    <PanelChrome
      title={state.title}
      description={panel.description ? () => replace(panel.description) : ""}
      width={box.width}
      height={box.height}
      hoverHeader={!state.title}
      displayMode={panel.transparent ? "transparent" : "default"}
      loadingState={error ? LoadingState.Error : LoadingState.Done}
      statusMessage={error}
    >
      {(width, height) => (
        <Boundary state={state}>
          <Content
            item={item}
            context={context}
            outerWidth={box.width}
            size={{ width, height }}
            onLoad={() => redraw((n) => n + 1)}
          />
        </Boundary>
      )}
    </PanelChrome>
  );
}

function Content({ item, context, outerWidth, size, onLoad }) {
  const { panel, state } = item;
  const [loaded, setLoaded] = useState();
  useEffect(() => {
    load(item, context, outerWidth)
      .then(setLoaded)
      .catch((error) => {
        state.state = "error";
        state.failure = error.stack;
      })
      .finally(onLoad);
  }, []);
  if (!loaded) return state.failure ? <div className="message">{state.failure}</div> : null;
  const Visualization = visualizations[panel.type];
  return (
    <Visualization
      {...loaded}
      {...size}
      {...context}
      panel={panel}
      state={state}
      timeZone="browser"
    />
  );
}

class Boundary extends Component {
  state = {};

  static getDerivedStateFromError(error) {
    return { error };
  }

  componentDidCatch(error) {
    Object.assign(this.props.state, { state: "error", failure: error.stack });
  }

  render() {
    return this.state.error ? (
      <div className="message">{this.state.error.message}</div>
    ) : (
      this.props.children
    );
  }
}
