//! Dots with their intervals: in named groups on one axis that lies, and over the depth of drafters.

use crate::svg::{
    Frame, STYLES, at, dashes, document, escape, is_drawable, legend_rows, line_sample, marker, nice_step, range, shortened,
    text_width, tick_text,
};

/// A value with its interval.
#[derive(Debug, Clone)]
pub(crate) struct Dot {
    /// Which colour and marker it gets.
    pub(crate) style: usize,
    pub(crate) value: f64,
    pub(crate) interval: Option<(f64, f64)>,
    /// Does not stretch the axis much: when it is far off, it stands at the right edge with an arrow.
    pub(crate) apart: bool,
    /// Stands beside it.
    pub(crate) text: String,
    pub(crate) hover: String,
}

/// Follows the value of a dot that lies beyond the axis.
const ARROW: &str = " →";

/// Dots in named groups.
pub(crate) struct DotChart {
    /// What is seen, for readers of screens.
    pub(crate) label: String,
    pub(crate) x_label: String,
    /// Names of the styles in use.
    pub(crate) legend: Vec<(usize, String)>,
    pub(crate) groups: Vec<(String, Vec<Dot>)>,
    /// A value that a line stands at.
    pub(crate) line_at: f64,
}

/// The checkpoints of one run, joined by a line.
pub(crate) struct DepthSeries {
    pub(crate) name: String,
    pub(crate) style: usize,
    /// With the layers of the drafter, ascending.
    pub(crate) points: Vec<(usize, Dot)>,
}

/// Dots over the depth of drafters.
pub(crate) struct DepthChart {
    pub(crate) label: String,
    pub(crate) y_label: String,
    pub(crate) series: Vec<DepthSeries>,
}

impl Dot {
    /// What it reaches over, as far as that can be drawn.
    fn reach(&self) -> impl Iterator<Item = f64> {
        let (low, high) = self.interval.unwrap_or((self.value, self.value));
        [low, self.value, high].into_iter().filter(|value| is_drawable(*value))
    }

    fn drawable_interval(&self) -> Option<(f64, f64)> {
        self.interval.filter(|(low, high)| is_drawable(*low) && is_drawable(*high))
    }
}

impl DepthSeries {
    fn drawable(&self) -> impl Iterator<Item = &(usize, Dot)> {
        self.points.iter().filter(|(_, dot)| is_drawable(dot.value))
    }
}

/// Draws groups below each other, each under its name.
pub(crate) fn dot_chart(chart: &DotChart, width: f64) -> String {
    let (mut body, top) = legend_rows(&chart.legend, width, |style, x, y| marker(style, x + 11.0, y));
    let dots = || chart.groups.iter().flat_map(|(_, dots)| dots).filter(|dot| is_drawable(dot.value));
    let (low, near) = range(dots().filter(|dot| !dot.apart).flat_map(Dot::reach).chain([chart.line_at]));
    let far = near + (near - low);
    let high = dots().map(|dot| dot.value).filter(|value| (near..=far).contains(value)).fold(near, f64::max);
    let reserved = dots().map(|dot| text_width(&dot.text)).fold(0.0, f64::max) + text_width(ARROW) + 12.0;
    let (left, right) = (8.0, (width - reserved).max(80.0));
    let step = nice_step(high - low, (right - left) / 72.0);
    let x = ((low / step + 1e-9).floor() * step, (high / step - 1e-9).ceil() * step);

    let (name_height, dot_height, gap) = (20.0, 18.0, 8.0);
    let rows: f64 = chart.groups.iter().map(|(_, dots)| name_height + dots.len() as f64 * dot_height + gap).sum();
    let frame = Frame { left, right, top, bottom: top + rows, x, y: (0.0, 1.0), y_step: 1.0, percent: false };
    let count = ((x.1 - x.0) / step).round().clamp(1.0, 40.0) as usize;
    let ticks: Vec<(f64, String)> = (0..=count)
        .map(|tick| {
            let value = x.0 + tick as f64 * step;
            (value, tick_text(value, step, false))
        })
        .collect();
    for (value, _) in &ticks {
        body += &format!(r#"<path class="grid" d="M{} {}V{}"/>"#, at(frame.x(*value)), at(top), at(frame.bottom));
    }
    body += &format!(r#"<path class="axis" d="M{} {}V{}"/>"#, at(frame.x(chart.line_at)), at(top), at(frame.bottom));
    body += &frame.x_axis(&ticks, &chart.x_label);

    let mut y = top;
    for (name, dots) in &chart.groups {
        let name = shortened(name, width - 8.0);
        body += &format!(r#"<text class="strong halo" x="0" y="{}">{}</text>"#, at(y + 14.0), escape(&name));
        y += name_height;
        for dot in dots {
            if is_drawable(dot.value) {
                let (x, middle) = (frame.x(dot.value.clamp(frame.x.0, frame.x.1)), y + dot_height / 2.0);
                let arrow = if dot.value > frame.x.1 { ARROW } else { "" };
                body += &format!("<g><title>{}</title>", escape(&dot.hover));
                if let Some((low, high)) = dot.drawable_interval() {
                    let (low, high, y) = (at(frame.x(low)), at(frame.x(high)), at(middle));
                    let (up, down) = (at(middle - 3.5), at(middle + 3.5));
                    body += &format!(r#"<path class="whisker" d="M{low} {up}V{down}M{low} {y}H{high}M{high} {up}V{down}"/>"#);
                }
                let end = dot.reach().fold(dot.value, f64::max);
                body += &format!(
                    r#"{}<text class="halo" x="{}" y="{}">{}{arrow}</text></g>"#,
                    marker(dot.style, x, middle),
                    at(frame.x(end.clamp(frame.x.0, frame.x.1)) + 8.0),
                    at(middle + 4.0),
                    escape(&dot.text),
                );
            }
            y += dot_height;
        }
        y += gap;
    }
    document(&chart.label, width, frame.bottom + 46.0, &body)
}

/// Draws a line a run over the number of layers.
pub(crate) fn depth_chart(chart: &DepthChart, width: f64) -> String {
    let points = || chart.series.iter().flat_map(DepthSeries::drawable);
    let depths: (usize, usize) = points().fold((usize::MAX, 0), |(low, high), (depth, _)| (low.min(*depth), high.max(*depth)));
    let (shallow, deep) = if depths.0 > depths.1 { (0, 1) } else { depths };
    let (low, high) = range(points().flat_map(|(_, dot)| dot.reach()));
    let legend: Vec<(usize, String)> = chart.series.iter().map(|series| (series.style, series.name.clone())).collect();
    let (mut body, top) = legend_rows(&legend, width, line_sample);

    let plot_height = (width * 0.38).clamp(170.0, 250.0);
    let y_step = nice_step(high - low, plot_height / 42.0);
    let y = ((low / y_step + 1e-9).floor() * y_step, (high / y_step - 1e-9).ceil() * y_step);
    let frame = Frame::new(width, top, plot_height, (shallow as f64 - 0.5, deep as f64 + 0.5), y, y_step, false);
    body += &frame.y_axis(&chart.y_label);
    let every = nice_step((deep - shallow + 1) as f64, (frame.right - frame.left) / 32.0).max(1.0) as usize;
    let ticks: Vec<(f64, String)> = (shallow..=deep).step_by(every).map(|depth| (depth as f64, depth.to_string())).collect();
    body += &frame.x_axis(&ticks, "layers of the drafter");

    for series in &chart.series {
        let style = series.style;
        let place = |(depth, dot): &(usize, Dot)| (frame.x(*depth as f64), frame.y(dot.value));
        let places: Vec<(f64, f64)> = series.drawable().map(place).collect();
        if places.len() > 1 {
            let path: Vec<String> = places.iter().map(|(x, y)| format!("{},{}", at(*x), at(*y))).collect();
            let (class, dash) = (style % STYLES, dashes(style));
            body += &format!(r#"<polyline class="line s{class}"{dash} points="{}"/>"#, path.join(" "));
        }
        for ((_, dot), (x, y)) in series.drawable().zip(&places) {
            body += &format!("<g><title>{}</title>", escape(&dot.hover));
            if let Some((low, high)) = dot.drawable_interval() {
                let (low, high) = (at(frame.y(low)), at(frame.y(high)));
                let (left, right, x) = (at(x - 3.5), at(x + 3.5), at(*x));
                body += &format!(r#"<path class="whisker" d="M{left} {high}H{right}M{x} {high}V{low}M{left} {low}H{right}"/>"#);
            }
            body += &format!("{}</g>", marker(style, *x, *y));
        }
    }
    document(&chart.label, width, frame.bottom + 46.0, &body)
}
