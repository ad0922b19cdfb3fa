// The level's functions as the table that the rest of the library calls.
extern const Kernels KERNELS = {
    group_index, Q8_BIAS,     unpack_row, round_row,  linear,   norm_row, add_row,
    scale_row,   softcap_row, activate_row, rotate_row, store_row,  store_column, attend,
    find_largest, draw_row,
};
